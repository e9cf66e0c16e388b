/* module_evict.c - methods of _C.Table that drop or restore tokens: evictions, windows, restored pages. */
#include "module.h"

#include "keep.h"

/* drop(before, chunk) -> pages */
PyObject *kvc_py_drop(kvc_py_table *self, PyObject *const *args, Py_ssize_t n)
{
    int64_t dropped;
    if (n != 2) return PyErr_Format(PyExc_TypeError, "drop: expected drop(before, chunk), got %zd arguments", n);
    long long chunk = PyLong_AsLongLong(args[1]);
    if (chunk == -1 && PyErr_Occurred()) return NULL;
    PyArrayObject *before = kvc_py_array(args[0], "drop: before", NPY_INT64, 1);
    if (!before) return NULL;
    kvc_status status = KVC_E_VALUE;
    bool apart = kvc_py_apart(before, "drop: before", self->table->pool, self->table) == 0;
    bool fits = apart && PyArray_DIM(before, 0) == self->table->batch;
    if (fits)
        status = kvc_table_drop(self->table, PyArray_DATA(before), chunk, &dropped);
    else if (apart)
        PyErr_Format(PyExc_ValueError, "drop: before: expected %lld rows, got %lld", (long long)self->table->batch,
                     (long long)PyArray_DIM(before, 0));
    Py_DECREF(before);
    if (!fits) return NULL;
    return status == KVC_OK ? PyLong_FromLongLong(dropped) : kvc_py_raise(status);
}

/* keep, formats (or None) -> (moves [n, 6], rows per sequence in the new table), or None if nothing changes */
PyObject *kvc_py_plan_evict(kvc_py_table *self, PyObject *const *args, Py_ssize_t n_args)
{
    PyArrayObject *keep = NULL, *formats = NULL;
    if (n_args < 1 || n_args > 2) return PyErr_Format(PyExc_TypeError, "plan_evict: expected (keep, formats=None)");
    keep = kvc_py_array(args[0], "plan_evict: keep", NPY_BOOL, 3);
    if (keep && n_args == 2 && args[1] != Py_None) formats = kvc_py_array(args[1], "plan_evict: formats", NPY_INT32, 3);
    kvc_status status = KVC_E_VALUE;
    if (keep && kvc_py_apart(keep, "plan_evict: keep", self->table->pool, self->table) < 0) Py_CLEAR(keep);
    if (formats && kvc_py_apart(formats, "plan_evict: formats", self->table->pool, self->table) < 0) Py_CLEAR(keep);
    bool fits = keep && PyArray_DIM(keep, 0) == self->table->batch &&
                (!formats ||
                 (PyArray_DIM(formats, 0) == PyArray_DIM(keep, 0) && PyArray_DIM(formats, 1) == PyArray_DIM(keep, 1)));
    if (fits && !PyErr_Occurred()) {
        kvc_demotion demote = {formats ? PyArray_DATA(formats) : NULL, formats ? PyArray_DIM(formats, 2) : 0};
        status = kvc_table_plan_evict(self->table, PyArray_DATA(keep), formats ? &demote : NULL, PyArray_DIM(keep, 1),
                                      PyArray_DIM(keep, 2));
        if (status != KVC_OK) kvc_py_raise(status);
    } else if (keep && !PyErr_Occurred())
        PyErr_Format(PyExc_ValueError,
                     "evict: keep: expected %lld rows (and formats as many, and as many heads), got %lld",
                     (long long)self->table->batch, (long long)PyArray_DIM(keep, 0));
    Py_XDECREF(keep);
    Py_XDECREF(formats);
    if (status != KVC_OK) return NULL;
    if (!kvc_table_evicts(self->table)) {
        kvc_table_rollback(self->table);
        Py_RETURN_NONE;
    }
    int64_t n, heads;
    const kvc_move *moves = kvc_table_moves(self->table, &n, &heads);
    npy_intp size[2] = {n, sizeof *moves / sizeof(int64_t)};
    PyObject *array = PyArray_SimpleNew(2, size, NPY_INT64);
    if (!array) {
        kvc_table_rollback(self->table);
        return NULL;
    }
    if (n) memcpy(PyArray_DATA((PyArrayObject *)array), moves, (size_t)n * sizeof *moves);
    return Py_BuildValue("(NL)", array, (long long)(heads == 1 ? self->table->spec.heads : 1));
}

/* runs int64 [n, 3] -> (slots, positions [B, 1 or H, N]) */
PyObject *kvc_py_tokens(kvc_py_table *self, PyObject *given)
{
    PyArrayObject *runs = kvc_py_array(given, "tokens: runs", NPY_INT64, 2);
    if (!runs) return NULL;
    npy_intp size[3] = {self->table->batch, self->table->table_heads, kvc_table_longest(self->table)};
    PyObject *slots = PyArray_SimpleNew(3, size, NPY_INT32), *positions = PyArray_SimpleNew(3, size, NPY_INT64);
    bool fits = slots && positions && PyArray_DIM(runs, 1) == 3;
    if (fits)
        kvc_table_tokens(self->table, PyArray_DATA(runs), PyArray_DIM(runs, 0), size[2],
                         PyArray_DATA((PyArrayObject *)slots), PyArray_DATA((PyArrayObject *)positions));
    else if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "tokens: runs: expected [n, 3], got another shape");
    Py_DECREF(runs);
    if (fits) return Py_BuildValue("(NN)", slots, positions);
    Py_XDECREF(slots);
    Py_XDECREF(positions);
    return NULL;
}

/* positions, real -> float32 [B, H, N] */
PyObject *kvc_py_means(kvc_py_table *self, PyObject *const *args, Py_ssize_t n)
{
    const kvc_table *t = self->table;
    PyObject *out = NULL;
    if (n != 2) return PyErr_Format(PyExc_TypeError, "means: expected means(positions, real), got %zd arguments", n);
    PyArrayObject *at = kvc_py_array(args[0], "means: positions", NPY_INT64, 3), *real = NULL;
    if (at) real = kvc_py_array(args[1], "means: real", NPY_INT64, 1);
    kvc_status status = KVC_OK;
    if (real) {
        npy_intp size[3] = {t->batch, t->spec.heads, PyArray_DIM(at, 2)};
        if (PyArray_DIM(at, 0) == t->batch && PyArray_DIM(at, 1) == t->table_heads && PyArray_DIM(real, 0) == t->batch)
            out = PyArray_SimpleNew(3, size, NPY_FLOAT32);
        else
            PyErr_SetString(PyExc_ValueError, "means: expected positions as tokens() gives them, got another shape");
        if (out)
            status =
                kvc_table_means(t, PyArray_DATA(at), PyArray_DATA(real), size[2], PyArray_DATA((PyArrayObject *)out));
    }
    Py_XDECREF(at);
    Py_XDECREF(real);
    if (status == KVC_OK) return out;
    Py_DECREF(out);
    return kvc_py_raise(status);
}

/* Arrays of a call. Either all are taken or none. An optional None is NULL. */
typedef struct taken {
    const char *name;
    int type, nd;
    bool optional;
    PyArrayObject *array;
} taken;

static bool take_all(taken *to, int n, PyObject *const *args)
{
    bool all = true;
    for (int i = 0; all && i < n; i++)
        if (!to[i].optional || args[i] != Py_None)
            all = (to[i].array = kvc_py_array(args[i], to[i].name, to[i].type, to[i].nd)) != NULL;
    return all;
}

static void give_all(taken *from, int n)
{
    for (int i = 0; i < n; i++) Py_XDECREF(from[i].array);
}

/* Combines slots and positions, for `heads` heads per sequence; false if the shapes do not match. */
static bool tokens_of(const taken *slots, const taken *positions, int64_t batch, int64_t heads, kvc_tokens *to)
{
    const npy_intp *size = PyArray_DIMS(slots->array), *other = PyArray_DIMS(positions->array);
    *to = (kvc_tokens){.batch = batch,
                       .heads = heads,
                       .line_heads = size[1],
                       .width = size[2],
                       .slots = PyArray_DATA(slots->array),
                       .positions = PyArray_DATA(positions->array)};
    return size[0] == batch && (size[1] == 1 || size[1] == heads) && other[0] == batch && other[1] == size[1] &&
           other[2] == size[2];
}

static bool has_shape(const taken *x, int64_t a, int64_t b, int64_t c)
{
    const npy_intp *size = PyArray_DIMS(x->array);
    return size[0] == a && (PyArray_NDIM(x->array) < 2 || size[1] == b) && (PyArray_NDIM(x->array) < 3 || size[2] == c);
}

/* (x, slots, positions, newest, kernel, largest) -> float32 [B, H, N] */
PyObject *kvc_py_smooth(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    taken a[] = {{"smooth: x", NPY_FLOAT32, 3, false, NULL},
                 {"smooth: slots", NPY_INT32, 3, false, NULL},
                 {"smooth: positions", NPY_INT64, 3, false, NULL},
                 {"smooth: newest", NPY_INT64, 1, false, NULL}};
    PyObject *out = NULL;
    kvc_tokens tokens;
    (void)module;
    if (n != 6) return PyErr_Format(PyExc_TypeError, "smooth: expected 6 arguments, got %zd", n);
    long long kernel = PyLong_AsLongLong(args[4]);
    int largest = PyObject_IsTrue(args[5]);
    if (!PyErr_Occurred() && take_all(a, 4, args)) {
        npy_intp *size = PyArray_DIMS(a[0].array);
        if (tokens_of(&a[1], &a[2], size[0], size[1], &tokens) && tokens.width == size[2] &&
            has_shape(&a[3], size[0], 0, 0))
            out = PyArray_SimpleNew(3, size, NPY_FLOAT32);
        else
            PyErr_SetString(PyExc_ValueError, "smooth: expected slots, positions and newest as x has rows, got others");
    }
    kvc_status status = KVC_OK;
    if (out)
        status = kvc_smooth(&tokens, PyArray_DATA(a[0].array), PyArray_DATA(a[3].array), kernel, largest,
                            PyArray_DATA((PyArrayObject *)out));
    give_all(a, 4);
    if (status == KVC_OK) return out;
    Py_DECREF(out);
    return kvc_py_raise(status);
}

/* (scores, slots, positions, protect or None, budget, newest, sinks) -> bool [B, 1 or H, N] */
PyObject *kvc_py_keep(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    taken a[] = {{"keep: scores", NPY_FLOAT32, 3, false, NULL},  {"keep: slots", NPY_INT32, 3, false, NULL},
                 {"keep: positions", NPY_INT64, 3, false, NULL}, {"keep: protect", NPY_BOOL, 3, true, NULL},
                 {"keep: budget", NPY_INT64, 2, false, NULL},    {"keep: newest", NPY_INT64, 1, false, NULL}};
    PyObject *out = NULL;
    kvc_tokens tokens;
    (void)module;
    if (n != 7) return PyErr_Format(PyExc_TypeError, "keep: expected 7 arguments, got %zd", n);
    long long sinks = PyLong_AsLongLong(args[6]);
    if (!PyErr_Occurred() && take_all(a, 6, args)) {
        int64_t batch = PyArray_DIM(a[4].array, 0), heads = PyArray_DIM(a[4].array, 1),
                given_heads = PyArray_DIM(a[0].array, 1);
        npy_intp size[3] = {batch, heads, PyArray_DIM(a[1].array, 2)};
        if (tokens_of(&a[1], &a[2], batch, heads, &tokens) && has_shape(&a[0], batch, given_heads, size[2]) &&
            (given_heads == heads || heads == 1) && (!a[3].array || has_shape(&a[3], batch, heads, size[2])) &&
            has_shape(&a[5], batch, 0, 0))
            out = PyArray_SimpleNew(3, size, NPY_BOOL);
        else
            PyErr_SetString(PyExc_ValueError,
                            "keep: expected scores, slots, positions, protect and newest as budget [B, heads] has rows "
                            "and heads, got others");
    }
    kvc_status status = KVC_OK;
    if (out) {
        kvc_keep_args rule = {.score_heads = PyArray_DIM(a[0].array, 1),
                              .sinks = sinks,
                              .scores = PyArray_DATA(a[0].array),
                              .protect = a[3].array ? PyArray_DATA(a[3].array) : NULL,
                              .budget = PyArray_DATA(a[4].array),
                              .newest = PyArray_DATA(a[5].array)};
        status = kvc_keep_tokens(&tokens, &rule, PyArray_DATA((PyArrayObject *)out));
    }
    give_all(a, 6);
    if (status == KVC_OK) return out;
    Py_DECREF(out);
    return kvc_py_raise(status);
}

PyObject *kvc_py_observe(kvc_py_table *self, PyObject *const *args, Py_ssize_t n)
{
    if (n != 2)
        return PyErr_Format(PyExc_TypeError, "observe: expected observe(attention, decay), got %zd arguments", n);
    double decay = PyFloat_AsDouble(args[1]);
    if (decay == -1 && PyErr_Occurred()) return NULL;
    PyArrayObject *received = kvc_py_array(args[0], "observe: attention", NPY_FLOAT32, 3);
    if (!received) return NULL;
    if (kvc_py_apart(received, "observe: attention", self->table->pool, self->table) < 0) {
        Py_DECREF(received);
        return NULL;
    }
    bool fits = PyArray_DIM(received, 0) == self->table->batch && PyArray_DIM(received, 1) == self->table->spec.heads;
    kvc_status status = KVC_OK;
    if (fits) status = kvc_table_observe(self->table, PyArray_DATA(received), PyArray_DIM(received, 2), (float)decay);
    Py_DECREF(received);
    if (!fits)
        return PyErr_Format(PyExc_ValueError, "observe: attention: expected [%lld, %lld, N], got another shape",
                            (long long)self->table->batch, (long long)self->table->spec.heads);
    return kvc_py_done(status);
}

/* (entries [B, Ht, P], rows [B, Ht, 2], slots [B, Ht, n] or None, scores [B, H, n] or None, seen) */
PyObject *kvc_py_restore(kvc_py_table *self, PyObject *args)
{
    static const char *const names[] = {"restore: entries", "restore: rows", "restore: slots", "restore: scores"};
    static const int types[] = {NPY_INT64, NPY_INT64, NPY_INT32, NPY_FLOAT32};
    PyObject *given[4], *result = NULL;
    PyArrayObject *array[4] = {0};
    long long seen;
    if (!PyArg_ParseTuple(args, "OOOOL", &given[0], &given[1], &given[2], &given[3], &seen)) return NULL;
    bool read = true;
    for (int i = 0; i < 4 && read; i++)
        if (i < 2 || given[i] != Py_None) read = (array[i] = kvc_py_array(given[i], names[i], types[i], 3)) != NULL;
    if (read) {
        const npy_intp *size = PyArray_DIMS(array[0]);
        bool fits = PyArray_DIM(array[1], 2) == 2;
        for (int i = 1; i < 4; i++) {
            npy_intp lines = i == 3 ? self->table->spec.heads : size[1];
            fits = fits && (!array[i] || (PyArray_DIM(array[i], 0) == size[0] && PyArray_DIM(array[i], 1) == lines));
        }
        kvc_contents x = {.batch = size[0],
                          .table_heads = size[1],
                          .columns = size[2],
                          .seen = seen,
                          .entries = PyArray_DATA(array[0]),
                          .rows = PyArray_DATA(array[1])};
        if (array[2]) x.slots = PyArray_DATA(array[2]), x.slot_capacity = PyArray_DIM(array[2], 2);
        if (array[3]) x.scores = PyArray_DATA(array[3]), x.score_capacity = PyArray_DIM(array[3], 2);
        if (fits)
            result = kvc_py_done(kvc_table_restore(self->table, &x));
        else
            PyErr_SetString(PyExc_ValueError, "restore: expected arrays with the same sequences and heads, got others");
    }
    for (int i = 0; i < 4; i++) Py_XDECREF(array[i]);
    return result;
}
