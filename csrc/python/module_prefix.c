/* module_prefix.c - kvcompress._C.Prefix; pages in bulk: take, drop, gather, scatter. */
#include "module.h"

#include "prefix.h"
#include "transfer.h"

typedef struct py_prefix {
    PyObject_HEAD kvc_prefix *prefix;
    PyObject *pool;
} py_prefix;

static PyTypeObject *prefix_type;

static PyObject *prefix_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"pool", "max_bytes", "max_entries", NULL};
    PyObject *pool;
    long long max_bytes = 0, max_entries = 0;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!|LL", names, kvc_py_pool_type, &pool, &max_bytes, &max_entries))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    py_prefix *self = (py_prefix *)allocate(type, 0);
    if (!self) return NULL;
    Py_INCREF(pool);
    self->pool = pool;
    kvc_status status = kvc_prefix_new(((kvc_py_pool *)pool)->pool, max_bytes, max_entries, &self->prefix);
    if (status == KVC_OK) return (PyObject *)self;
    Py_DECREF(self);
    return kvc_py_raise(status);
}

static void prefix_dealloc(py_prefix *self)
{
    PyTypeObject *type = Py_TYPE(self);
    kvc_prefix_free(self->prefix);
    Py_XDECREF(self->pool);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* A chain from Python arguments, which must outlive it. */
typedef struct chain_args {
    kvc_chain chain;
    PyArrayObject *tokens, *entries;
    int64_t links; /* number of full links in the tokens */
    int by;
} chain_args;

/* (root, tokens, first, step, first_entries, later_entries[, entries or by]) */
static int read_chain(PyObject *args, chain_args *a, const char *last)
{
    const char *root;
    Py_ssize_t root_bytes;
    PyObject *tokens, *entries = NULL;
    long long first, step, first_entries, later_entries;
    *a = (chain_args){.by = 1};
    char format[16];
    snprintf(format, sizeof format, "y#OLLLL%s", last);
    void *extra = last[0] == 'O' ? (void *)&entries : (void *)&a->by;
    if (!PyArg_ParseTuple(args, format, &root, &root_bytes, &tokens, &first, &step, &first_entries, &later_entries,
                          extra))
        return -1;
    if (root_bytes != KVC_DIGEST) {
        PyErr_Format(PyExc_ValueError, "prefix: root: expected %d bytes, got %zd", KVC_DIGEST, root_bytes);
        return -1;
    }
    if (first < 1 || step < 1 || first_entries < 1 || later_entries < 1) {
        PyErr_SetString(PyExc_ValueError, "prefix: expected links of at least 1 token and 1 page");
        return -1;
    }
    if (!(a->tokens = kvc_py_array(tokens, "prefix: tokens", NPY_INT64, 1))) return -1;
    int64_t n = PyArray_DIM(a->tokens, 0);
    a->chain = (kvc_chain){.tokens = PyArray_DATA(a->tokens),
                           .n = n,
                           .first = first,
                           .step = step,
                           .first_entries = first_entries,
                           .later_entries = later_entries};
    memcpy(a->chain.root, root, KVC_DIGEST);
    a->links = n < first ? 0 : 1 + (n - first) / step;
    if (!entries) return 0;
    a->entries = kvc_py_array(entries, "prefix: entries", NPY_INT64, 1);
    int64_t most = (INT64_MAX - first_entries) / later_entries;
    int64_t wanted = !a->links ? 0 : a->links > most ? INT64_MAX : first_entries + (a->links - 1) * later_entries;
    if (a->entries && PyArray_DIM(a->entries, 0) == wanted) return 0;
    if (a->entries)
        PyErr_Format(PyExc_ValueError, "prefix: entries: expected %lld, got %lld", (long long)wanted,
                     (long long)PyArray_DIM(a->entries, 0));
    Py_XDECREF(a->entries);
    Py_DECREF(a->tokens);
    return -1;
}

static PyObject *end_chain(chain_args *a, int64_t links)
{
    Py_DECREF(a->tokens);
    Py_XDECREF(a->entries);
    return PyLong_FromLongLong(links);
}

static PyObject *prefix_put(py_prefix *self, PyObject *args)
{
    chain_args a;
    int64_t links;
    if (read_chain(args, &a, "O") < 0) return NULL;
    kvc_status status = kvc_prefix_put(self->prefix, &a.chain, PyArray_DATA(a.entries), &links);
    PyObject *result = end_chain(&a, links);
    if (status == KVC_OK) return result;
    Py_XDECREF(result);
    return kvc_py_raise(status);
}

static PyObject *prefix_take(py_prefix *self, PyObject *args)
{
    chain_args a;
    if (read_chain(args, &a, "O") < 0) return NULL;
    const char *tokens = PyArray_BYTES(a.tokens), *entries = PyArray_BYTES(a.entries);
    bool apart = tokens + PyArray_NBYTES(a.tokens) <= entries || entries + PyArray_NBYTES(a.entries) <= tokens;
    if (!PyArray_ISWRITEABLE(a.entries) || !apart) {
        PyErr_SetString(PyExc_ValueError,
                        "prefix: entries: expected an array that can be written and shares no memory with tokens");
        Py_CLEAR(a.entries);
        Py_DECREF(a.tokens);
        return NULL;
    }
    return end_chain(&a, kvc_prefix_take(self->prefix, &a.chain, PyArray_DATA(a.entries)));
}

static PyObject *prefix_find(py_prefix *self, PyObject *args)
{
    chain_args a;
    if (read_chain(args, &a, "") < 0) return NULL;
    return end_chain(&a, kvc_prefix_find(self->prefix, &a.chain));
}

static PyObject *prefix_pin(py_prefix *self, PyObject *args)
{
    chain_args a;
    if (read_chain(args, &a, "i") < 0) return NULL;
    return end_chain(&a, kvc_prefix_pin(self->prefix, &a.chain, a.by < 0 ? -1 : 1));
}

static PyObject *prefix_trim(py_prefix *self, PyObject *args)
{
    long long bytes, links = INT64_MAX;
    if (!PyArg_ParseTuple(args, "L|L", &bytes, &links)) return NULL;
    kvc_prefix_trim(self->prefix, bytes, links);
    Py_RETURN_NONE;
}

/* ---------------------------------------------------------------- links whose pages are offloaded */

static PyObject *new_array(int64_t n)
{
    npy_intp size = (npy_intp)n;
    return PyArray_SimpleNew(1, &size, NPY_INT64);
}

static PyObject *prefix_oldest(py_prefix *self, PyObject *here)
{
    kvc_link_info l;
    int whether = PyObject_IsTrue(here);
    if (whether < 0) return NULL;
    if (!kvc_prefix_oldest(self->prefix, whether, &l)) Py_RETURN_NONE;
    return Py_BuildValue("Ly#LL", (long long)l.id, (const char *)l.root, (Py_ssize_t)KVC_DIGEST, (long long)l.n_entries,
                         (long long)l.parent);
}

static PyObject *prefix_entries(py_prefix *self, PyObject *args)
{
    long long id, n;
    if (!PyArg_ParseTuple(args, "LL", &id, &n)) return NULL;
    if (n < 0 || n > INT32_MAX)
        return PyErr_Format(PyExc_ValueError, "prefix: expected 0 entries or more, got %lld", n);
    PyObject *entries = new_array(n), *sizes = new_array(n);
    int64_t *data = entries && sizes ? PyArray_DATA((PyArrayObject *)entries) : NULL;
    if (data && kvc_prefix_entries(self->prefix, id, n, data)) {
        int64_t *bytes = PyArray_DATA((PyArrayObject *)sizes);
        for (long long i = 0; i < n; i++)
            bytes[i] = kvc_pool_bytes(((kvc_py_pool *)self->pool)->pool, kvc_entry_offset(data[i]));
        return Py_BuildValue("NN", entries, sizes);
    }
    Py_XDECREF(entries);
    Py_XDECREF(sizes);
    if (!data) return NULL;
    Py_RETURN_NONE;
}

static PyObject *by_id(py_prefix *self, PyObject *id, bool act(kvc_prefix *, int64_t))
{
    long long value = PyLong_AsLongLong(id);
    if (value == -1 && PyErr_Occurred()) return NULL;
    return PyBool_FromLong(act(self->prefix, value));
}

static PyObject *prefix_offload(py_prefix *self, PyObject *id) { return by_id(self, id, kvc_prefix_offload); }

static PyObject *prefix_forget(py_prefix *self, PyObject *id) { return by_id(self, id, kvc_prefix_forget); }

static PyObject *prefix_bring(py_prefix *self, PyObject *args)
{
    long long id;
    PyObject *object;
    PyArrayObject *entries;
    if (!PyArg_ParseTuple(args, "LO", &id, &object)) return NULL;
    if (!(entries = kvc_py_array(object, "prefix: entries", NPY_INT64, 1))) return NULL;
    bool done = kvc_prefix_bring(self->prefix, id, PyArray_DIM(entries, 0), PyArray_DATA(entries));
    Py_DECREF(entries);
    return PyBool_FromLong(done);
}

static PyObject *prefix_offloaded(py_prefix *self, PyObject *args)
{
    chain_args a;
    if (read_chain(args, &a, "") < 0) return NULL;
    PyObject *ids = new_array(a.links);
    int64_t n = ids ? kvc_prefix_offloaded(self->prefix, &a.chain, PyArray_DATA((PyArrayObject *)ids)) : 0;
    Py_XDECREF(end_chain(&a, n));
    PyObject *found = ids ? PySequence_GetSlice(ids, 0, (Py_ssize_t)n) : NULL;
    Py_XDECREF(ids);
    return found;
}

static PyObject *prefix_weaken(py_prefix *self, PyObject *bytes)
{
    long value = PyLong_AsLong(bytes);
    if (value == -1 && PyErr_Occurred()) return NULL;
    if (value < 0 || value > KVC_DIGEST) return PyErr_Format(PyExc_ValueError, "weaken: expected 0 to %d", KVC_DIGEST);
    kvc_prefix_weaken(self->prefix, (int)value);
    Py_RETURN_NONE;
}

static PyObject *prefix_check(py_prefix *self, PyObject *unused)
{
    (void)unused;
    kvc_status status = kvc_prefix_check(self->prefix);
    if (status != KVC_OK) return kvc_py_raise(status);
    Py_RETURN_NONE;
}

static PyObject *prefix_stats(py_prefix *self, PyObject *unused)
{
    kvc_prefix_stats s;
    (void)unused;
    kvc_prefix_get_stats(self->prefix, &s);
    return Py_BuildValue("{s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L}", "entries", (long long)s.links, "bytes",
                         (long long)s.bytes, "pinned", (long long)s.pinned, "offloaded", (long long)s.offloaded, "hits",
                         (long long)s.hits, "hit_tokens", (long long)s.hit_tokens, "hit_bytes", (long long)s.hit_bytes,
                         "evicted", (long long)s.evicted, "collisions", (long long)s.collisions);
}

#define METHOD(name, how, about) {#name, (PyCFunction)(void (*)(void))prefix_##name, how, about}
static PyMethodDef methods[] = {
    METHOD(put, METH_VARARGS, "put(root, tokens, first, step, first_entries, later_entries, entries) -> links stored."),
    METHOD(take, METH_VARARGS, "As put, but writes known entries, each with a reference -> number of links known."),
    METHOD(find, METH_VARARGS, "As take, without entries -> number of links known."),
    METHOD(pin, METH_VARARGS, "pin(root, .., later_entries, by) -> links: by 1 pins known links, by -1 unpins them."),
    METHOD(trim, METH_VARARGS, "trim(bytes, links=any): evicts the least recently used links."),
    METHOD(oldest, METH_O,
           "oldest(here) -> (id, root, entries, parent's id or 0) of the least recently used link, or None."),
    METHOD(entries, METH_VARARGS, "entries(id, n) -> (its n entries, each with a reference, bytes of each), or None."),
    METHOD(offload, METH_O, "offload(id) -> bool: removes the pages of a link."),
    METHOD(bring, METH_VARARGS, "bring(id, entries) -> bool: restores the pages of a link."),
    METHOD(forget, METH_O, "forget(id) -> bool: removes a link."),
    METHOD(offloaded, METH_VARARGS, "As find -> ids of the offloaded links after the known ones with pages."),
    METHOD(weaken, METH_O, "Tests: shortens digests to this many bytes."),
    METHOD(check, METH_NOARGS, "Checks every invariant."),
    METHOD(stats, METH_NOARGS, "Entries, bytes, hits, saved tokens and bytes."),
    {NULL, NULL, 0, NULL}};
static PyType_Slot slots[] = {{Py_tp_new, (void *)prefix_new},
                              {Py_tp_dealloc, (void *)prefix_dealloc},
                              {Py_tp_methods, methods},
                              {Py_tp_doc, "Prefix(pool, max_bytes=0, max_entries=0): index of the pages of prefixes."},
                              {0, NULL}};
static PyType_Spec spec = {"kvcompress._C.Prefix", sizeof(py_prefix), 0, Py_TPFLAGS_DEFAULT, slots};

int kvc_py_add_prefix(PyObject *module)
{
    prefix_type = (PyTypeObject *)PyType_FromSpec(&spec);
    return prefix_type ? PyModule_AddObjectRef(module, "Prefix", (PyObject *)prefix_type) : -1;
}

/* ---------------------------------------------------------------- pages in bulk */

PyObject *kvc_py_sha256(PyObject *module, PyObject *object)
{
    char *data;
    Py_ssize_t bytes;
    uint8_t digest[KVC_DIGEST];
    kvc_sha256 h;
    (void)module;
    if (PyBytes_AsStringAndSize(object, &data, &bytes) < 0) return NULL;
    kvc_sha256_begin(&h);
    kvc_sha256_add(&h, data, bytes);
    kvc_sha256_end(&h, digest);
    return PyBytes_FromStringAndSize((char *)digest, KVC_DIGEST);
}

/* (pool, pieces int64 [n, 2], memory uint8 [bytes]) -> checksum */
static PyObject *transfer(PyObject *args, bool out)
{
    PyObject *pool, *piece_object, *memory_object;
    PyArrayObject *pieces, *memory;
    if (!PyArg_ParseTuple(args, "O!OO", kvc_py_pool_type, &pool, &piece_object, &memory_object)) return NULL;
    if (!(pieces = kvc_py_array(piece_object, "transfer: pieces", NPY_INT64, 2))) return NULL;
    if (!(memory = kvc_py_array(memory_object, "transfer: memory", NPY_UINT8, 1))) {
        Py_DECREF(pieces);
        return NULL;
    }
    kvc_pool *p = ((kvc_py_pool *)pool)->pool;
    int64_t n = PyArray_DIM(pieces, 0);
    bool apart = kvc_py_apart(memory, "transfer: memory", p, NULL) == 0, fits = apart && PyArray_DIM(pieces, 1) == 2;
    fits = fits && (!out || PyArray_ISWRITEABLE(memory));
    /* copied, because other threads may run during the transfer */
    kvc_piece *data = fits ? PyMem_Malloc((size_t)(n + 1) * sizeof *data) : NULL;
    if (data && n) memcpy(data, PyArray_DATA(pieces), (size_t)n * sizeof *data);
    if (fits && !data) PyErr_NoMemory();
    kvc_status status = data ? kvc_pieces_check(data, n, kvc_pool_extent(p), PyArray_DIM(memory, 0)) : KVC_E_VALUE;
    if (apart && !fits)
        PyErr_SetString(PyExc_ValueError, "transfer: expected pieces [n, 2] and memory that can be written");
    if (data && status != KVC_OK) kvc_py_raise(status);
    uint64_t sum = 0;
    void *bytes = PyArray_DATA(memory);
    if (status == KVC_OK) {
        Py_BEGIN_ALLOW_THREADS sum =
            out ? kvc_gather(kvc_pool_base(p), data, n, bytes) : kvc_scatter(kvc_pool_base(p), data, n, bytes);
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(data);
    Py_DECREF(pieces);
    Py_DECREF(memory);
    return status == KVC_OK ? PyLong_FromUnsignedLongLong(sum) : NULL;
}

PyObject *kvc_py_gather(PyObject *module, PyObject *args)
{
    (void)module;
    return transfer(args, true);
}

PyObject *kvc_py_scatter(PyObject *module, PyObject *args)
{
    (void)module;
    return transfer(args, false);
}

PyObject *kvc_py_checksum(PyObject *module, PyObject *object)
{
    (void)module;
    PyArrayObject *memory = kvc_py_array(object, "checksum", NPY_UINT8, 1);
    if (!memory) return NULL;
    int64_t bytes = PyArray_DIM(memory, 0);
    uint64_t sum = 0;
    const void *data = PyArray_DATA(memory);
    if (bytes % 16 == 0) {
        Py_BEGIN_ALLOW_THREADS sum = kvc_checksum(data, bytes);
        Py_END_ALLOW_THREADS
    } else {
        PyErr_SetString(PyExc_ValueError, "checksum: expected a multiple of 16 bytes");
    }
    Py_DECREF(memory);
    return bytes % 16 ? NULL : PyLong_FromUnsignedLongLong(sum);
}
