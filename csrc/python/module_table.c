/* module_table.c - kvcompress._C.Table. */
#include "module.h"

PyTypeObject *kvc_py_table_type;

static PyObject *wrap(PyTypeObject *type, PyObject *pool)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    kvc_py_table *self = (kvc_py_table *)allocate(type, 0);
    if (!self) return NULL;
    Py_INCREF(pool);
    self->pool = pool;
    return (PyObject *)self;
}

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"pool",   "heads", "key_dim", "value_dim", "batch",  "page_size", "sinks",
                            "recent", "raw",   "key",     "value",     "direct", NULL};
    PyObject *pool;
    long long heads, key_dim, value_dim, batch, page_size = 64, sinks = 4, recent = 0;
    int raw = 0, key = 0, value = 0, direct = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!LLLL|LLLiiip", names, kvc_py_pool_type, &pool, &heads, &key_dim,
                                     &value_dim, &batch, &page_size, &sinks, &recent, &raw, &key, &value, &direct))
        return NULL;
    kvc_spec spec = {heads, key_dim, value_dim, page_size, sinks, recent, raw, key, value, direct != 0};
    kvc_py_table *self = (kvc_py_table *)wrap(type, pool);
    if (!self) return NULL;
    kvc_status status = kvc_table_new(((kvc_py_pool *)pool)->pool, &spec, batch, &self->table);
    if (status != KVC_OK) {
        Py_DECREF(self);
        return kvc_py_raise(status);
    }
    return (PyObject *)self;
}

static void table_dealloc(kvc_py_table *self)
{
    PyTypeObject *type = Py_TYPE(self);
    kvc_table_free(self->table);
    Py_XDECREF(self->pool);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* ---------------------------------------------------------------- arrays */

static void release_array(PyObject *capsule) { kvc_array_release(PyCapsule_GetPointer(capsule, NULL)); }

/* A view that keeps its array alive even if the table replaces it. */
static PyObject *view(int nd, const npy_intp *size, int type, void *array)
{
    PyObject *keeper = PyCapsule_New(kvc_array_retain(array), NULL, release_array);
    if (!keeper) kvc_array_release(array);
    return kvc_py_view(nd, size, type, array, keeper);
}

static PyObject *get_entries(kvc_py_table *self, void *unused)
{
    npy_intp size[3] = {self->table->batch, self->table->table_heads, self->table->columns};
    (void)unused;
    return view(3, size, NPY_INT64, self->table->entries);
}

static PyObject *get_rows(kvc_py_table *self, void *unused)
{
    npy_intp size[3] = {self->table->batch, self->table->table_heads, 2};
    (void)unused;
    return view(3, size, NPY_INT64, self->table->rows);
}

static PyObject *get_slots(kvc_py_table *self, void *unused)
{
    npy_intp size[3] = {self->table->batch, self->table->table_heads, self->table->slot_capacity}, none = 0;
    (void)unused;
    if (!self->table->slots) return PyArray_SimpleNew(1, &none, NPY_INT32);
    return view(3, size, NPY_INT32, self->table->slots);
}

static PyObject *get_scores(kvc_py_table *self, void *unused)
{
    npy_intp size[3] = {self->table->batch, self->table->spec.heads, self->table->score_capacity}, none = 0;
    (void)unused;
    if (!self->table->scores) return PyArray_SimpleNew(1, &none, NPY_FLOAT32);
    return view(3, size, NPY_FLOAT32, self->table->scores);
}

static PyObject *get_version(kvc_py_table *self, void *unused)
{
    (void)unused;
    return PyLong_FromLongLong(self->table->version);
}

static PyObject *get_seen(kvc_py_table *self, void *unused)
{
    (void)unused;
    return PyLong_FromLongLong(self->table->seen);
}

static PyObject *get_batch(kvc_py_table *self, void *unused)
{
    (void)unused;
    return PyLong_FromLongLong(self->table->batch);
}

static PyObject *get_longest(kvc_py_table *self, void *unused)
{
    (void)unused;
    return PyLong_FromLongLong(kvc_table_longest(self->table));
}

static PyObject *get_live(kvc_py_table *self, void *unused)
{
    npy_intp size = self->table->batch;
    (void)unused;
    PyObject *live = PyArray_SimpleNew(1, &size, NPY_INT64);
    if (live) kvc_table_live(self->table, PyArray_DATA((PyArrayObject *)live));
    return live;
}

static PyObject *get_spans(kvc_py_table *self, void *unused)
{
    (void)unused;
    PyObject *list = PyList_New(0);
    for (int64_t i = 0; list && i < self->table->n_spans; i++) {
        const kvc_span *span = &self->table->spans[i];
        PyObject *row = Py_BuildValue("(Lii)", (long long)span->end, span->key, span->value);
        if (!row || PyList_Append(list, row) < 0) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static int set_spans(kvc_py_table *self, PyObject *rows, void *unused)
{
    kvc_span spans[KVC_MAX_SPANS] = {0};
    (void)unused;
    Py_ssize_t n = rows ? PySequence_Length(rows) : 0;
    if (n < 0) return -1;
    for (Py_ssize_t i = 0; i < n && i < KVC_MAX_SPANS; i++) {
        PyObject *row = PySequence_GetItem(rows, i);
        long long end = 0;
        bool read = row && PyTuple_Check(row) && PyArg_ParseTuple(row, "Lii", &end, &spans[i].key, &spans[i].value);
        if (row && !PyTuple_Check(row)) PyErr_SetString(PyExc_TypeError, "spans: expected tuples (end, key, value)");
        Py_XDECREF(row);
        if (!read) return -1;
        spans[i].end = end;
    }
    kvc_status status = kvc_table_set_spans(self->table, spans, n);
    if (status != KVC_OK) kvc_py_raise(status);
    return status == KVC_OK ? 0 : -1;
}

static PyObject *get_pool(kvc_py_table *self, void *unused)
{
    (void)unused;
    Py_INCREF(self->pool);
    return self->pool;
}

/* ---------------------------------------------------------------- methods */

PyObject *kvc_py_done(kvc_status status)
{
    if (status != KVC_OK) return kvc_py_raise(status);
    Py_RETURN_NONE;
}

static PyObject *table_plan(kvc_py_table *self, PyObject *const *args, Py_ssize_t n)
{
    const uint8_t *real = NULL;
    PyArrayObject *mask = NULL;
    if (n < 1 || n > 2) return PyErr_Format(PyExc_TypeError, "plan: expected plan(T, real=None), got %zd arguments", n);
    long long T = PyLong_AsLongLong(args[0]);
    if (T == -1 && PyErr_Occurred()) return NULL;
    if (n == 2 && args[1] != Py_None) {
        mask = kvc_py_array(args[1], "plan: real", NPY_BOOL, 2);
        if (!mask) return NULL;
        if (kvc_py_apart(mask, "plan: real", self->table->pool, self->table) < 0) {
            Py_DECREF(mask);
            return NULL;
        }
        if (PyArray_DIM(mask, 0) != self->table->batch || PyArray_DIM(mask, 1) != T) {
            PyErr_Format(PyExc_ValueError, "plan: real: expected [%lld, %lld], got [%lld, %lld]",
                         (long long)self->table->batch, T, (long long)PyArray_DIM(mask, 0),
                         (long long)PyArray_DIM(mask, 1));
            Py_DECREF(mask);
            return NULL;
        }
        real = PyArray_DATA(mask);
    }
    kvc_status status = kvc_table_plan(self->table, T, real);
    Py_XDECREF(mask);
    if (status != KVC_OK) return kvc_py_raise(status);
    int64_t count;
    const int64_t *seals = kvc_table_seals(self->table, &count);
    npy_intp size[2] = {count, 2};
    PyObject *array = PyArray_SimpleNew(2, size, NPY_INT64);
    if (!array)
        kvc_table_rollback(self->table);
    else if (count)
        memcpy(PyArray_DATA((PyArrayObject *)array), seals, (size_t)(2 * count) * sizeof *seals);
    return array;
}

static PyObject *table_plan_fill(kvc_py_table *self, PyObject *tokens)
{
    long long T = PyLong_AsLongLong(tokens);
    if (T == -1 && PyErr_Occurred()) return NULL;
    kvc_status status = kvc_table_plan(self->table, T, NULL);
    if (status != KVC_OK) return kvc_py_raise(status);
    bool fills = kvc_table_only_fills(self->table);
    if (!fills) kvc_table_rollback(self->table);
    return PyBool_FromLong(fills);
}

static PyObject *table_commit(kvc_py_table *self, PyObject *unused)
{
    (void)unused;
    kvc_table_commit(self->table);
    Py_RETURN_NONE;
}

static PyObject *table_rollback(kvc_py_table *self, PyObject *unused)
{
    (void)unused;
    kvc_table_rollback(self->table);
    Py_RETURN_NONE;
}

static PyObject *table_crop(kvc_py_table *self, PyObject *seen)
{
    long long value = PyLong_AsLongLong(seen);
    if (value == -1 && PyErr_Occurred()) return NULL;
    return kvc_py_done(kvc_table_crop(self->table, value));
}

static PyObject *table_reserve(kvc_py_table *self, PyObject *tokens)
{
    long long value = PyLong_AsLongLong(tokens);
    if (value == -1 && PyErr_Occurred()) return NULL;
    return kvc_py_done(kvc_table_reserve(self->table, value));
}

static PyObject *table_keep_scores(kvc_py_table *self, PyObject *on)
{
    int wanted = PyObject_IsTrue(on);
    return wanted < 0 ? NULL : kvc_py_done(kvc_table_keep_scores(self->table, wanted));
}

static PyObject *table_select(kvc_py_table *self, PyObject *const *args, Py_ssize_t n)
{
    if (n < 1) return PyErr_Format(PyExc_TypeError, "select: expected (index, *tables), got no arguments");
    kvc_table **tables = PyMem_Malloc((size_t)n * sizeof(kvc_table *));
    if (!tables) return PyErr_NoMemory();
    tables[0] = self->table;
    for (Py_ssize_t i = 1; i < n; i++) {
        if (!PyObject_TypeCheck(args[i], kvc_py_table_type)) {
            PyMem_Free(tables);
            return PyErr_Format(PyExc_TypeError, "select: expected tables behind the index");
        }
        tables[i] = ((kvc_py_table *)args[i])->table;
    }
    PyArrayObject *array = kvc_py_array(args[0], "select: index", NPY_INT64, 1);
    for (Py_ssize_t i = 0; array && i < n; i++)
        if (kvc_py_apart(array, "select: index", tables[i]->pool, tables[i]) < 0) Py_CLEAR(array);
    kvc_status status = array ? kvc_tables_select(tables, n, PyArray_DATA(array), PyArray_DIM(array, 0)) : KVC_OK;
    PyMem_Free(tables);
    if (!array) return NULL;
    Py_DECREF(array);
    return kvc_py_done(status);
}

static PyObject *table_reset(kvc_py_table *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"batch", NULL};
    long long batch = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|L", names, &batch)) return NULL;
    return kvc_py_done(kvc_table_reset(self->table, batch));
}

static PyObject *table_clone(kvc_py_table *self, PyObject *unused)
{
    (void)unused;
    kvc_py_table *copy = (kvc_py_table *)wrap(kvc_py_table_type, self->pool);
    if (!copy) return NULL;
    kvc_status status = kvc_table_clone(self->table, &copy->table);
    if (status == KVC_OK) return (PyObject *)copy;
    Py_DECREF(copy);
    return kvc_py_raise(status);
}

static PyObject *table_stats(kvc_py_table *self, PyObject *unused)
{
    kvc_table_stats s;
    (void)unused;
    kvc_table_get_stats(self->table, &s);
    return Py_BuildValue("{s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L}", "seen", (long long)s.seen, "kept", (long long)s.kept,
                         "sealed_bytes", (long long)s.sealed_bytes, "open_bytes", (long long)s.open_bytes, "sink_bytes",
                         (long long)s.sink_bytes, "table_bytes", (long long)s.table_bytes, "sealed_pages",
                         (long long)s.sealed_pages, "open_pages", (long long)s.open_pages, "rewritten",
                         (long long)s.rewritten);
}

#define METHOD(name, how, about) {#name, (PyCFunction)(void (*)(void))table_##name, how, about}
#define OTHER(name, how, about) {#name, (PyCFunction)(void (*)(void))kvc_py_##name, how, about}
static PyMethodDef methods[] = {
    METHOD(plan, METH_FASTCALL, "plan(T, real=None) -> seals [n, 2]: plans an append of T tokens per row."),
    METHOD(plan_fill, METH_O,
           "plan_fill(T) -> bool: plan(T), if it seals nothing and changes no entry; else False, without a plan."),
    METHOD(commit, METH_NOARGS, "Commits the planned append or eviction."),
    METHOD(rollback, METH_NOARGS, "Discards the planned append or eviction."),
    OTHER(takes, METH_FASTCALL,
          "takes(k, v, device=-1) -> int: number of tokens of torch tensors on the CPU, or on that GPU, if they can be "
          "appended; else 0."),
    OTHER(step, METH_FASTCALL,
          "step(q, k, v, scale, window, softcap) -> (out, lse): appends and attends; returns None and does nothing if "
          "the call is not supported."),
    METHOD(crop, METH_O, "crop(seen): removes all tokens with slot >= seen."),
    OTHER(
        plan_evict, METH_FASTCALL,
        "plan_evict(keep [B, 1 or H, N], formats=None) -> (moves [n, 6], 1 or H), or None if nothing changes: plans an "
        "eviction by index; formats int32 [B, 1 or H, P]: new formats of closed pages."),
    OTHER(tokens, METH_O,
          "tokens(runs [n, 3]) -> (slots int32, positions int64 [B, 1 or H, N]): see kvc_table_tokens."),
    OTHER(means, METH_FASTCALL,
          "means(positions, real [B]) -> float32 [B, H, N]: scores per query; see kvc_table_means."),
    METHOD(reserve, METH_O, "reserve(tokens): capacity for this many tokens per row, without later reallocation."),
    OTHER(drop, METH_FASTCALL, "drop(before [B], chunk) -> pages freed at the front of rows: see kvc_table_drop."),
    METHOD(keep_scores, METH_O, "keep_scores(on): enables or removes a score for each stored token and head."),
    OTHER(observe, METH_FASTCALL, "observe(attention [B, H, N], decay): scores become scores * decay + attention."),
    METHOD(select, METH_FASTCALL,
           "select(index, *tables): row i becomes old row index[i], in all tables or none; pages are shared."),
    METHOD(reset, METH_VARARGS | METH_KEYWORDS, "reset(batch=0): removes all tokens; batch: new size, 0: unchanged."),
    OTHER(restore, METH_VARARGS, "restore(entries, rows, slots, scores, seen): fills an empty table with pages."),
    METHOD(clone, METH_NOARGS, "A copy that shares all pages."),
    METHOD(stats, METH_NOARGS, "Numbers of tokens and pages, bytes by part."),
    {NULL, NULL, 0, NULL}};
#define PROPERTY(name, about) {#name, (getter)(void (*)(void))get_##name, NULL, about, NULL}
static PyGetSetDef properties[] = {
    PROPERTY(entries, "int64 [B, 1 or H, P], no copy"),
    PROPERTY(rows, "int64 [B, 1 or H, 2]: stored tokens, first slot; no copy"),
    PROPERTY(slots, "int32 [B, 1 or H, capacity], no copy; empty while slot = first + index"),
    PROPERTY(scores, "float32 [B, H, capacity], no copy; empty without keep_scores"),
    PROPERTY(version, "changes when one of the arrays is reallocated"),
    PROPERTY(seen, "number of slots so far, padding included"),
    PROPERTY(batch, "number of sequences"),
    PROPERTY(longest, "stored tokens of the longest line, dead ones included"),
    PROPERTY(live, "int64 [B]: live stored tokens, summed over heads"),
    PROPERTY(pool, "the pool"),
    {"spans", (getter)(void (*)(void))get_spans, (setter)(void (*)(void))set_spans,
     "[(end, key, value)]: formats of pages sealed from now on, by position", NULL},
    {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot slots[] = {
    {Py_tp_new, (void *)table_new},
    {Py_tp_dealloc, (void *)table_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {Py_tp_doc, "Table(pool, *, heads, key_dim, value_dim, batch, ...): block table of B sequences."},
    {0, NULL}};
static PyType_Spec spec = {"kvcompress._C.Table", sizeof(kvc_py_table), 0, Py_TPFLAGS_DEFAULT, slots};

int kvc_py_add_table(PyObject *module)
{
    kvc_py_table_type = (PyTypeObject *)PyType_FromSpec(&spec);
    return kvc_py_table_type ? PyModule_AddObjectRef(module, "Table", (PyObject *)kvc_py_table_type) : -1;
}
