/* module_pool.c - kvcompress._C.Pool. */
#include "module.h"

PyTypeObject *kvc_py_pool_type;

/* Converts to a number of bytes; -1 with an exception. 0 if absent. */
static long long bytes_of(const char *name, PyObject *given)
{
    if (!given) return 0;
    if (!PyBool_Check(given) && PyIndex_Check(given)) return PyLong_AsLongLong(given);
    PyErr_Format(PyExc_TypeError, "Pool: %s: expected a number of bytes as an int, such as 1 << 30 for 1 GiB, got %R",
                 name, given);
    return -1;
}

static PyObject *pool_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"max_bytes", "keep_bytes", "shared", NULL};
    PyObject *most = NULL, *kept = NULL;
    int shared = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|OOp", names, &most, &kept, &shared)) return NULL;
    long long max_bytes = bytes_of("max_bytes", most);
    long long keep_bytes = PyErr_Occurred() ? -1 : bytes_of("keep_bytes", kept);
    if (PyErr_Occurred()) return NULL;
    if (shared && max_bytes)
        return PyErr_Format(PyExc_ValueError,
                            "pool: expected max_bytes or shared, got both; limits need a separate address space");
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    kvc_py_pool *self = (kvc_py_pool *)allocate(type, 0);
    if (!self) return NULL;
    self->shared = shared;
    kvc_status status = shared ? kvc_pool_new_shared(&self->pool) : kvc_pool_new(max_bytes, &self->pool);
    if (status == KVC_OK) status = kvc_pool_keep(self->pool, keep_bytes);
    if (status != KVC_OK) {
        Py_DECREF(self);
        return kvc_py_raise(status);
    }
    return (PyObject *)self;
}

static void pool_dealloc(kvc_py_pool *self)
{
    PyTypeObject *type = Py_TYPE(self);
    kvc_pool_release(self->pool);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *pool_arena(kvc_py_pool *self, void *unused)
{
    npy_intp size = kvc_pool_extent(self->pool);
    (void)unused;
    Py_INCREF(self);
    PyObject *array = kvc_py_view(1, &size, NPY_UINT8, kvc_pool_base(self->pool), (PyObject *)self);
    return array;
}

static PyObject *pool_extent(kvc_py_pool *self, void *unused)
{
    (void)unused;
    return PyLong_FromLongLong(kvc_pool_extent(self->pool));
}

static PyObject *pool_shared(kvc_py_pool *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(self->shared);
}

static PyObject *pool_stats(kvc_py_pool *self, PyObject *unused)
{
    kvc_pool_stats s;
    (void)unused;
    kvc_pool_get_stats(self->pool, &s);
    return Py_BuildValue("{s:L,s:L,s:L,s:L,s:L}", "reserved", (long long)s.reserved, "resident", (long long)s.resident,
                         "used", (long long)s.used, "slots", (long long)s.slots, "slabs", (long long)s.slabs);
}

static PyObject *pool_limit(kvc_py_pool *self, PyObject *bytes)
{
    long long most = bytes_of("limit", bytes);
    if (most == -1 && PyErr_Occurred()) return NULL;
    kvc_status status = kvc_pool_limit(self->pool, most);
    if (status != KVC_OK) return kvc_py_raise(status);
    Py_RETURN_NONE;
}

static PyObject *pool_check(kvc_py_pool *self, PyObject *unused)
{
    (void)unused;
    kvc_status status = kvc_pool_check(self->pool);
    if (status != KVC_OK) return kvc_py_raise(status);
    Py_RETURN_NONE;
}

static PyObject *pool_alloc(kvc_py_pool *self, PyObject *bytes)
{
    int64_t offset;
    long long wanted = bytes_of("alloc", bytes);
    if (wanted == -1 && PyErr_Occurred()) return NULL;
    if (wanted <= 0) return PyErr_Format(PyExc_ValueError, "alloc: expected at least 1 byte, got %lld", wanted);
    kvc_status status = kvc_pool_alloc(self->pool, wanted, &offset);
    return status == KVC_OK ? PyLong_FromLongLong(offset) : kvc_py_raise(status);
}

/* The offset of a slot in use, or -1 with an exception. */
static long long live_offset(kvc_py_pool *self, PyObject *object)
{
    long long offset = PyLong_AsLongLong(object);
    if (offset == -1 && PyErr_Occurred()) return -1;
    if (kvc_pool_refs(self->pool, offset) > 0) return offset;
    PyErr_Format(PyExc_ValueError, "pool: expected the offset of a slot in use, got %lld", offset);
    return -1;
}

static PyObject *pool_ref(kvc_py_pool *self, PyObject *object)
{
    long long offset = live_offset(self, object);
    if (offset < 0) return NULL;
    kvc_pool_ref(self->pool, offset);
    Py_RETURN_NONE;
}

static PyObject *pool_unref(kvc_py_pool *self, PyObject *object)
{
    long long offset = live_offset(self, object);
    if (offset < 0) return NULL;
    kvc_pool_unref(self->pool, offset);
    Py_RETURN_NONE;
}

static PyObject *pool_refs(kvc_py_pool *self, PyObject *object)
{
    long long offset = PyLong_AsLongLong(object);
    if (offset == -1 && PyErr_Occurred()) return NULL;
    return PyLong_FromLongLong(kvc_pool_refs(self->pool, offset));
}

/* int64 array of sizes -> int64 offsets, in the array `offsets` if given; allocates all slots or none. */
static PyObject *pool_take(kvc_py_pool *self, PyObject *const *args, Py_ssize_t given)
{
    if (given < 1 || given > 2)
        return PyErr_Format(PyExc_TypeError, "take: expected (sizes, offsets=None), got %zd arguments", given);
    PyArrayObject *sizes = kvc_py_array(args[0], "take: sizes", NPY_INT64, 1);
    if (!sizes) return NULL;
    npy_intp n = PyArray_DIM(sizes, 0), done = 0;
    PyObject *offsets = given == 1 ? PyArray_SimpleNew(1, &n, NPY_INT64)
                                   : (PyObject *)kvc_py_array(args[1], "take: offsets", NPY_INT64, 1);
    if (offsets && (PyArray_DIM((PyArrayObject *)offsets, 0) != n || !PyArray_ISWRITEABLE((PyArrayObject *)offsets))) {
        kvc_py_refuse("take: offsets", "a writable array as long as sizes", (PyArrayObject *)offsets);
        Py_CLEAR(offsets);
    }
    int64_t *to = offsets ? PyArray_DATA((PyArrayObject *)offsets) : NULL;
    const int64_t *bytes = PyArray_DATA(sizes);
    kvc_status status = KVC_OK;
    while (to && done < n && (status = kvc_pool_alloc(self->pool, bytes[done], &to[done])) == KVC_OK) done++;
    Py_DECREF(sizes);
    if (status == KVC_OK) return offsets;
    while (done) {
        kvc_pool_unref(self->pool, to[--done]);
        to[done] = -1;
    }
    Py_DECREF(offsets);
    return kvc_py_raise(status);
}

/* Drops one reference per slot of an int64 array of offsets, after checking all of them. */
static PyObject *pool_drop(kvc_py_pool *self, PyObject *object)
{
    PyArrayObject *offsets = kvc_py_array(object, "drop: offsets", NPY_INT64, 1);
    if (!offsets) return NULL;
    npy_intp n = PyArray_DIM(offsets, 0), good = 0;
    const int64_t *from = PyArray_DATA(offsets);
    while (good < n && kvc_pool_refs(self->pool, from[good]) > 0) good++;
    if (good == n) /* check again: the array may list a slot twice */
        for (good = 0; good < n && kvc_pool_refs(self->pool, from[good]) > 0; good++)
            kvc_pool_unref(self->pool, from[good]);
    if (good < n)
        PyErr_Format(PyExc_ValueError, "pool: expected offsets of slots in use, got %lld", (long long)from[good]);
    Py_DECREF(offsets);
    if (good < n) return NULL;
    Py_RETURN_NONE;
}

static PyObject *pool_reduce(kvc_py_pool *self, PyObject *unused)
{
    (void)self, (void)unused;
    PyErr_SetString(
        PyExc_TypeError,
        "Pool: cannot be copied or pickled (torch.save pickles too); caches can share one; create another in another "
        "process, and use KVCache.save(path) to keep a cache");
    return NULL;
}

static PyMethodDef methods[] = {
    {"__reduce__", (PyCFunction)(void (*)(void))pool_reduce, METH_NOARGS,
     "Raises TypeError: pools are memory of this process."},
    {"stats", (PyCFunction)(void (*)(void))pool_stats, METH_NOARGS,
     "stats() -> dict: reserved, resident and used bytes; number of slots and slabs."},
    {"check", (PyCFunction)(void (*)(void))pool_check, METH_NOARGS,
     "check(): raises if an invariant of the pool is violated."},
    {"limit", (PyCFunction)(void (*)(void))pool_limit, METH_O, "limit(bytes): maximum of the extent."},
    {"alloc", (PyCFunction)(void (*)(void))pool_alloc, METH_O,
     "alloc(bytes) -> offset, with one reference. Raises MemoryError."},
    {"ref", (PyCFunction)(void (*)(void))pool_ref, METH_O,
     "ref(offset): adds a reference. Raises ValueError for a free slot."},
    {"unref", (PyCFunction)(void (*)(void))pool_unref, METH_O,
     "unref(offset): removes a reference; the last one frees the slot."},
    {"take", (PyCFunction)(void (*)(void))pool_take, METH_FASTCALL,
     "take(int64 sizes, offsets=None) -> offsets, each with one reference: all or none (MemoryError). offsets: an "
     "array of -1 to write them to, so that the caller has them even if Ctrl-C comes as the call returns."},
    {"drop", (PyCFunction)(void (*)(void))pool_drop, METH_O, "drop(int64 offsets): removes a reference from each."},
    {"refs", (PyCFunction)(void (*)(void))pool_refs, METH_O,
     "refs(offset) -> number of references to the slot; 0 if there is none."},
    {NULL, NULL, 0, NULL}};
static PyGetSetDef properties[] = {
    {"arena", (getter)(void (*)(void))pool_arena, NULL, "uint8 array over all slabs, no copy.", NULL},
    {"extent", (getter)(void (*)(void))pool_extent, NULL, "Length of the arena; grows, never shrinks.", NULL},
    {"shared", (getter)(void (*)(void))pool_shared, NULL, "Whether it uses the address space of all shared pools.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot slots[] = {
    {Py_tp_new, (void *)pool_new},
    {Py_tp_dealloc, (void *)pool_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {Py_tp_doc,
     "Pool(max_bytes=0, keep_bytes=0, shared=False): memory for the reference-counted pages of caches. Thread-safe.\n\n"
     "max_bytes: limit in bytes, whose address space is reserved now; 0: the machine's memory.\n"
     "keep_bytes: maximum free memory to keep for reuse; the rest is returned to the system.\n"
     "shared: use the address space of all shared pools, so that there can be any number of them.\n\n"
     "Raises TypeError or ValueError for invalid arguments, MemoryError without address space."},
    {0, NULL}};
static PyType_Spec spec = {"kvcompress._C.Pool", sizeof(kvc_py_pool), 0, Py_TPFLAGS_DEFAULT, slots};

int kvc_py_add_pool(PyObject *module)
{
    kvc_py_pool_type = (PyTypeObject *)PyType_FromSpec(&spec);
    return kvc_py_pool_type ? PyModule_AddObjectRef(module, "Pool", (PyObject *)kvc_py_pool_type) : -1;
}
