/* module_held.c - kvcompress._C.Held: keeps the raw pages that an append seals until the forward pass has succeeded. In
 * C, so that references are updated atomically: a KeyboardInterrupt can occur between any two Python bytecodes. */
#include "module.h"
#include "page.h"

#include <stdlib.h>

typedef struct cell {
    int64_t b, h, c; /* of the table's cell */
    int64_t entry;   /* raw page kept here */
} cell;

typedef struct py_held {
    PyObject_HEAD PyObject *table;
    int64_t n;
    cell *cells;
} py_held;

static int64_t *entry_at(const kvc_table *t, const cell *at)
{
    return &t->entries[(at->b * t->table_heads + at->h) * t->columns + at->c];
}

/* Whether the table still has a page in that cell. */
static bool there(const kvc_table *t, const cell *at)
{
    return at->b < t->batch && at->h < t->table_heads && at->c < t->columns && *entry_at(t, at) != KVC_NONE;
}

static int by_sealed(const void *a, const void *b)
{
    int64_t x = ((const int64_t *)a)[1], y = ((const int64_t *)b)[1];
    return (x > y) - (x < y);
}

/* The raw entry that was sealed to `entry`, or KVC_NONE. `seals` is sorted by sealed entries. */
static int64_t raw_of(const int64_t *seals, int64_t n, int64_t entry)
{
    const int64_t wanted[2] = {0, entry}, *found = bsearch(wanted, seals, (size_t)n, sizeof wanted, by_sealed);
    return found ? found[0] : KVC_NONE;
}

/* Counts the cells that contain sealed entries; also writes them unless `to` is NULL. */
static int64_t find_cells(const kvc_table *t, const int64_t *seals, int64_t n, cell *to)
{
    int64_t count = 0;
    for (int64_t b = 0; b < t->batch; b++)
        for (int64_t h = 0; h < t->table_heads; h++)
            for (int64_t c = 0; c < t->columns; c++) {
                cell at = {b, h, c, KVC_NONE};
                at.entry = raw_of(seals, n, *entry_at(t, &at));
                if (at.entry == KVC_NONE) continue;
                if (to) to[count] = at;
                count++;
            }
    return count;
}

/* Takes references to the entries from before the plan, for the cells that the plan has sealed. */
static int take_before(cell *cells, int64_t n, PyArrayObject *before)
{
    const npy_intp *size = PyArray_DIMS(before);
    const int64_t *from = PyArray_DATA(before);
    for (int64_t i = 0; i < n; i++) {
        cell *at = &cells[i];
        if (at->b >= size[0] || at->h >= size[1] || at->c >= size[2]) {
            PyErr_SetString(PyExc_ValueError, "Held: before: expected the cells of the pages that were sealed");
            return -1;
        }
        at->entry = from[(at->b * size[1] + at->h) * size[2] + at->c];
    }
    return 0;
}

static int fill(py_held *self, PyArrayObject *seals, PyArrayObject *before)
{
    const kvc_table *t = ((kvc_py_table *)self->table)->table;
    int64_t n = PyArray_DIM(seals, 0);
    int64_t *sorted = PyMem_Malloc(((size_t)n + 1) * 2 * sizeof *sorted);
    cell *cells = NULL;
    if (!sorted) goto no_memory;
    memcpy(sorted, PyArray_DATA(seals), (size_t)n * 2 * sizeof *sorted);
    qsort(sorted, (size_t)n, 2 * sizeof *sorted, by_sealed);
    int64_t count = find_cells(t, sorted, n, NULL);
    cells = PyMem_Malloc(((size_t)count + 1) * sizeof *cells);
    if (!cells) goto no_memory;
    find_cells(t, sorted, n, cells);
    PyMem_Free(sorted);
    if (before && take_before(cells, count, before) < 0) goto failed;
    for (int64_t i = 0; i < count; i++)
        if (cells[i].entry < 0 || kvc_pool_refs(t->pool, kvc_entry_offset(cells[i].entry)) < 1) {
            PyErr_Format(PyExc_ValueError, "Held: expected entries of slots in use, got %lld",
                         (long long)cells[i].entry);
            goto failed;
        }
    for (int64_t i = 0; i < count; i++) kvc_pool_ref(t->pool, kvc_entry_offset(cells[i].entry));
    self->cells = cells;
    self->n = count;
    return 0;
no_memory:
    PyMem_Free(sorted);
    PyErr_NoMemory();
failed:
    PyMem_Free(cells);
    return -1;
}

static PyObject *held_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"table", "seals", "before", NULL};
    PyObject *table, *seals, *before = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!O|O", names, kvc_py_table_type, &table, &seals, &before))
        return NULL;
    PyArrayObject *pairs = kvc_py_array(seals, "Held: seals", NPY_INT64, 2), *old = NULL;
    if (!pairs) return NULL;
    PyObject *made = NULL;
    if (PyArray_DIM(pairs, 1) != 2) {
        PyErr_Format(PyExc_ValueError, "Held: seals: expected [n, 2], got [n, %zd]", (Py_ssize_t)PyArray_DIM(pairs, 1));
        goto done;
    }
    if (before != Py_None && !(old = kvc_py_array(before, "Held: before", NPY_INT64, 3))) goto done;
    made = ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!made) goto done;
    Py_INCREF(table);
    ((py_held *)made)->table = table;
    if (fill((py_held *)made, pairs, old) < 0) Py_CLEAR(made);
done:
    Py_DECREF(pairs);
    Py_XDECREF(old);
    return made;
}

static void held_dealloc(py_held *self)
{
    PyTypeObject *type = Py_TYPE(self);
    for (int64_t i = 0; i < self->n; i++)
        kvc_pool_unref(((kvc_py_table *)self->table)->table->pool, kvc_entry_offset(self->cells[i].entry));
    PyMem_Free(self->cells);
    Py_XDECREF(self->table);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *held_restore(py_held *self, PyObject *unused)
{
    const kvc_table *t = ((kvc_py_table *)self->table)->table;
    (void)unused;
    for (int64_t i = 0; i < self->n; i++)
        if (!there(t, &self->cells[i])) Py_RETURN_NONE; /* cropped or reset in the meantime: nothing to restore */
    for (int64_t i = 0; i < self->n; i++) {             /* the references move with the entries */
        int64_t *now = entry_at(t, &self->cells[i]), old = self->cells[i].entry;
        self->cells[i].entry = *now;
        *now = old;
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"restore", (PyCFunction)(void (*)(void))held_restore, METH_NOARGS,
                                 "Puts the raw pages back in the table, if the sealed ones are still there."},
                                {NULL, NULL, 0, NULL}};
static PyType_Slot slots[] = {
    {Py_tp_new, (void *)held_new},
    {Py_tp_dealloc, (void *)held_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_doc,
     "Held(table, seals [n, 2], before=None): the raw pages that a plan of the table seals. They live as long as this "
     "object. before: entries before a plan that may have sealed copies of its own."},
    {0, NULL}};
static PyType_Spec spec = {"kvcompress._C.Held", sizeof(py_held), 0, Py_TPFLAGS_DEFAULT, slots};

int kvc_py_add_held(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&spec);
    int status = type ? PyModule_AddObjectRef(module, "Held", type) : -1;
    Py_XDECREF(type);
    return status;
}
