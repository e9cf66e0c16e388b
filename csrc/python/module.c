/* module.c - kvcompress._C: CPU report, formats, pool, tables and codecs for NumPy. Loads without torch. */
#define KVC_IMPORT_NUMPY
#include "module.h"
#include "varlen.h"

#include "ops.h"

PyObject *kvc_py_raise(kvc_status status)
{
    PyObject *type = status == KVC_E_MEMORY ? PyExc_MemoryError
                     : status == KVC_E_TYPE ? PyExc_TypeError
                                            : PyExc_ValueError;
    PyErr_SetString(type, kvc_error());
    return NULL;
}

PyObject *kvc_py_view(int nd, const npy_intp *size, int type, void *data, PyObject *base)
{
    PyObject *array = base ? PyArray_SimpleNewFromData(nd, size, type, data) : NULL;
    if (!array || PyArray_SetBaseObject((PyArrayObject *)array, base) < 0) { /* steals base, even on failure */
        if (!array) Py_XDECREF(base);
        Py_XDECREF(array);
        return NULL;
    }
    return array;
}

void kvc_py_refuse(const char *what, const char *wanted, PyArrayObject *array)
{
    PyObject *shape = PyObject_GetAttrString((PyObject *)array, "shape");
    PyObject *strides = PyObject_GetAttrString((PyObject *)array, "strides");
    if (shape && strides) {
        PyErr_Format(PyExc_ValueError,
                     "%s: expected %s, got shape %S and strides %S bytes%s%s; use numpy.ascontiguousarray", what,
                     wanted, shape, strides, PyArray_ISALIGNED(array) ? "" : ", not aligned",
                     PyArray_ISNOTSWAPPED(array) ? "" : ", in another byte order");
    }
    Py_XDECREF(shape);
    Py_XDECREF(strides);
}

PyArrayObject *kvc_py_array(PyObject *object, const char *what, int type, int nd)
{
    if (!PyArray_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s: expected a NumPy array, got %R; use numpy.asarray", what, Py_TYPE(object));
        return NULL;
    }
    PyArrayObject *array = (PyArrayObject *)object;
    if (PyArray_TYPE(array) != type) {
        PyArray_Descr *wanted = PyArray_DescrFromType(type);
        PyErr_Format(PyExc_TypeError, "%s: expected dtype %S, got %S; convert it first", what, wanted,
                     PyArray_DESCR(array));
        Py_XDECREF(wanted);
        return NULL;
    }
    if ((nd >= 0 && PyArray_NDIM(array) != nd) || !PyArray_IS_C_CONTIGUOUS(array) || !PyArray_ISBEHAVED_RO(array)) {
        char wanted[64];
        snprintf(wanted, sizeof wanted, nd < 0 ? "a C-contiguous array" : "a C-contiguous array of %d dimensions", nd);
        kvc_py_refuse(what, wanted, array);
        return NULL;
    }
    Py_INCREF(object);
    return array;
}

int kvc_py_apart(PyArrayObject *array, const char *what, const kvc_pool *pool, const kvc_table *t)
{
    const struct {
        const void *data;
        int64_t bytes;
    } other[] = {{kvc_pool_base(pool), kvc_pool_extent(pool)},
                 {t ? t->entries : NULL, t ? t->batch * t->table_heads * t->columns * 8 : 0},
                 {t ? t->rows : NULL, t ? t->batch * t->table_heads * 16 : 0},
                 {t ? t->slots : NULL, t ? t->batch * t->table_heads * t->slot_capacity * 4 : 0},
                 {t ? t->scores : NULL, t ? t->batch * t->spec.heads * t->score_capacity * 4 : 0}};
    uintptr_t begin = (uintptr_t)PyArray_DATA(array), end = begin + (uintptr_t)PyArray_NBYTES(array);
    for (size_t i = 0; i < sizeof other / sizeof *other; i++) {
        uintptr_t from = (uintptr_t)other[i].data;
        if (!other[i].data || end <= from || begin >= from + (uintptr_t)other[i].bytes) continue;
        PyErr_Format(PyExc_ValueError,
                     "%s: expected memory apart from the %s, which the call writes, got a view of it; use .copy()",
                     what, i ? "table's arrays" : "pool's arena");
        return -1;
    }
    return 0;
}

static PyObject *truth(int x) { return x ? Py_True : Py_False; }

static PyObject *formats(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    static const char *const keys[] = {"token", "centred", "channel"}; /* enum kvc_keys */
    PyObject *all = PyTuple_New(KVC_FORMATS);
    for (int i = 0; all && i < KVC_FORMATS; i++) {
        const kvc_format_info *f = kvc_format_get(i);
        kvc_traits t = kvc_format_traits(i);
        PyObject *one = Py_BuildValue(
            "{s:i,s:s,s:i,s:i,s:s,s:O,s:O,s:O,s:O,s:i,s:s}", "code", i, "name", f->name, "bits", f->bits, "group",
            f->group, "keys", keys[f->keys], "zero_point", truth(t.coding == KVC_CODING_UINT), "block_scale",
            truth(t.scale != KVC_SCALE_F16), "rotated", truth(f->rotated == KVC_ROTATED), "calibrated",
            truth(f->rotated == KVC_DIGITS), "dim_multiple", f->dim_multiple, "about", f->about);
        if (!one || PyTuple_SetItem(all, i, one) < 0) Py_CLEAR(all);
    }
    return all;
}

static PyObject *page_bytes(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"key", "value", "key_dim", "value_dim", "page_size", NULL};
    int key, value;
    long long key_dim, value_dim, page_size = 64;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "iiLL|L", names, &key, &value, &key_dim, &value_dim, &page_size))
        return NULL;
    int64_t bytes = kvc_page_bytes(key, value, key_dim, value_dim, page_size);
    return bytes ? PyLong_FromLongLong(bytes) : kvc_py_raise(KVC_E_VALUE);
}

static PyObject *page_geometry(PyObject *module, PyObject *args)
{
    int key, value, raw;
    long long heads, key_dim, value_dim, page_size;
    kvc_geometry g;
    (void)module;
    if (!PyArg_ParseTuple(args, "iiiLLLL", &key, &value, &raw, &heads, &key_dim, &value_dim, &page_size)) return NULL;
    kvc_status status = kvc_page_geometry(key, value, raw, heads, key_dim, value_dim, page_size, &g);
    if (status != KVC_OK) return kvc_py_raise(status);
    return Py_BuildValue("LLL", (long long)g.head_bytes, (long long)g.page_bytes, (long long)g.residual_bytes);
}

static PyObject *side_bytes(PyObject *module, PyObject *args)
{
    int format, key;
    long long dim, page_size;
    (void)module;
    if (!PyArg_ParseTuple(args, "ipLL", &format, &key, &dim, &page_size)) return NULL;
    kvc_status status = kvc_format_check(format, dim);
    if (status == KVC_OK) status = kvc_page_size_check(page_size, "side_bytes");
    if (status != KVC_OK) return kvc_py_raise(status);
    return PyLong_FromLongLong(page_size / KVC_TILE * kvc_tile_bytes(format, dim) +
                               kvc_meta_bytes(format, key, dim, page_size));
}

static PyObject *isa(PyObject *module, PyObject *unused)
{
    const char *name;
    (void)module, (void)unused;
    kvc_status status = kvc_isa(&name);
    return status == KVC_OK ? PyUnicode_FromString(name) : kvc_py_raise(status);
}

static PyObject *isa_available(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    int n = 0;
    while (kvc_isa_available(n)) n++;
    PyObject *all = PyTuple_New(n);
    for (int i = 0; all && i < n; i++)
        if (PyTuple_SetItem(all, i, PyUnicode_FromString(kvc_isa_available(i))) < 0) Py_CLEAR(all);
    return all;
}

static PyObject *cpu_features(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    PyObject *all = PyDict_New();
    bool there;
    for (int i = 0; all && kvc_cpu_feature(i, &there); i++)
        if (PyDict_SetItemString(all, kvc_cpu_feature(i, &there), there ? Py_True : Py_False) < 0) Py_CLEAR(all);
    return all;
}

static PyObject *alloc_fail_at(PyObject *module, PyObject *n)
{
    (void)module;
    long long value = PyLong_AsLongLong(n);
    if (value == -1 && PyErr_Occurred()) return NULL;
    kvc_alloc_fail_at(value);
    Py_RETURN_NONE;
}

static PyObject *alloc_poison(PyObject *module, PyObject *on)
{
    (void)module;
    int value = PyObject_IsTrue(on);
    if (value < 0) return NULL;
    kvc_alloc_poison(value);
    Py_RETURN_NONE;
}

static PyObject *alloc_live(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyLong_FromLongLong(kvc_alloc_live());
}

static PyObject *handles_live(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyLong_FromLongLong(kvc_ops_handles());
}

static PyObject *bind_torch(PyObject *module, PyObject *path)
{
    (void)module;
    const char *text = PyUnicode_AsUTF8AndSize(path, NULL);
    const char *reason = text ? kvc_ops_bind(text) : NULL;
    if (reason) PyErr_SetString(PyExc_ImportError, reason);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static PyObject *bind_cuda(PyObject *module, PyObject *args)
{
    const char *torch, *library;
    (void)module;
    if (!PyArg_ParseTuple(args, "ss", &torch, &library)) return NULL;
    const char *reason = kvc_cuda_bind(torch, library);
    if (reason) PyErr_SetString(PyExc_ImportError, reason);
    if (reason) return NULL;
    Py_RETURN_NONE;
}

static PyObject *cuda_found(PyObject *module, PyObject *index)
{
    (void)module;
    long device = PyLong_AsLong(index);
    int64_t found;
    if (PyErr_Occurred()) return NULL;
    kvc_status status = kvc_gpu_found((int)device, &found);
    return status == KVC_OK ? PyLong_FromLongLong(found) : kvc_py_raise(status);
}

/* Checks for a C-contiguous int64 array in native byte order; NULL with a ValueError otherwise. */
static PyArrayObject *words(PyObject *object)
{
    PyArrayObject *array = PyArray_Check(object) ? (PyArrayObject *)object : NULL;
    if (array && PyArray_TYPE(array) == NPY_INT64 && PyArray_IS_C_CONTIGUOUS(array) && PyArray_ISNOTSWAPPED(array))
        return array;
    PyErr_SetString(PyExc_ValueError, "find: expected contiguous int64 arrays");
    return NULL;
}

static PyObject *find(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (n != 2) return PyErr_Format(PyExc_TypeError, "find: expected (arrays, array), got %zd arguments", n);
    PyArrayObject *all = words(args[0]), *one = all ? words(args[1]) : NULL;
    if (!one) return NULL;
    int nd = PyArray_NDIM(one);
    size_t bytes = (size_t)PyArray_NBYTES(one);
    bool alike = PyArray_NDIM(all) == nd + 1;
    for (int d = 0; alike && d < nd; d++) alike = PyArray_DIM(all, d + 1) == PyArray_DIM(one, d);
    for (npy_intp i = 0; alike && i < PyArray_DIM(all, 0); i++)
        if (memcmp(PyArray_BYTES(all) + (size_t)i * bytes, PyArray_DATA(one), bytes) == 0) return PyLong_FromSsize_t(i);
    return PyLong_FromLong(-1);
}

#define FUNCTION(name, how, about) {#name, (PyCFunction)(void (*)(void))name, how, about}
static PyMethodDef functions[] = {
    FUNCTION(formats, METH_NOARGS, "The format table: a tuple of dicts."),
    FUNCTION(page_bytes, METH_VARARGS | METH_KEYWORDS, "Bytes of a page of one KV head, metadata included."),
    FUNCTION(page_geometry, METH_VARARGS, "Bytes of pages in an engine's blocks: per head, of all heads, raw."),
    FUNCTION(side_bytes, METH_VARARGS, "Bytes of codes and metadata of one side (K or V) of a page."),
    FUNCTION(isa, METH_NOARGS, "Name of the kernel level in use."),
    FUNCTION(isa_available, METH_NOARGS, "Names of the levels that this CPU supports, best last."),
    FUNCTION(cpu_features, METH_NOARGS, "CPU features: name -> bool."),
    FUNCTION(alloc_fail_at, METH_O, "Makes the n-th allocation from now fail (tests); 0 turns it off."),
    FUNCTION(alloc_poison, METH_O, "Turns filling of new memory and pages with NaN on or off (tests)."),
    FUNCTION(alloc_live, METH_NOARGS, "Blocks allocated now."),
    FUNCTION(handles_live, METH_NOARGS, "Tensor handles that ops hold now; 0 between calls."),
    FUNCTION(bind_torch, METH_O, "Registers torch.ops.kvcompress with the libtorch_cpu at this path."),
    FUNCTION(bind_cuda, METH_VARARGS,
             "bind_cuda(libtorch_cuda, library): uses the kernels of `library` for ops on a GPU."),
    FUNCTION(cuda_found, METH_O, "Error bits that kernels on a device recorded since the last call; -1: no kernels."),
    {"bind_tensors", kvc_py_bind_tensors, METH_O,
     "bind_tensors(torch.Tensor) -> whether it has DLPack's C exchange API."},
    {"quantize", (PyCFunction)(void (*)(void))kvc_py_quantize, METH_VARARGS | METH_KEYWORDS,
     "quantize(x, format) -> (codes, scales): rows of the last axis, as the op of this name."},
    {"dequantize", (PyCFunction)(void (*)(void))kvc_py_dequantize, METH_VARARGS | METH_KEYWORDS,
     "dequantize(codes, scales, format) -> float32 array."},
    {"pack", (PyCFunction)(void (*)(void))kvc_py_pack, METH_VARARGS | METH_KEYWORDS,
     "pack(k, v, key, value, page_size=64) -> uint8 pages [B, T / page_size, H, page bytes]."},
    {"keep", (PyCFunction)(void (*)(void))kvc_py_keep, METH_FASTCALL,
     "keep(scores, slots, positions, protect, budget, newest, sinks) -> bool [B, 1 or H, N]: see kvc_keep_tokens."},
    {"smooth", (PyCFunction)(void (*)(void))kvc_py_smooth, METH_FASTCALL,
     "smooth(x, slots, positions, newest, kernel, largest) -> float32 [B, H, N]: see kvc_smooth."},
    {"sha256", kvc_py_sha256, METH_O, "SHA-256 of bytes."},
    {"gather", kvc_py_gather, METH_VARARGS,
     "gather(pool, pieces [n, 2], memory) -> checksum: copies pieces (offset, bytes) of the arena into memory."},
    {"scatter", kvc_py_scatter, METH_VARARGS, "scatter(pool, pieces, memory) -> checksum: the inverse of gather."},
    {"find", (PyCFunction)(void (*)(void))find, METH_FASTCALL,
     "find(arrays int64 [n, ..], array int64 [..]) -> int: index of the first equal one; -1 if there is none."},
    {"checksum", kvc_py_checksum, METH_O, "The checksum of memory, as returned by gather."},
    {"schemes", kvc_py_schemes, METH_NOARGS, "The table of quantization schemes: a tuple of dicts."},
    {"quantize_by", (PyCFunction)(void (*)(void))kvc_py_quantize_by, METH_VARARGS | METH_KEYWORDS,
     "quantize_by(x [B, H, T, D], scheme, granularity, group=0, packing=0, scale=None, zero=None, tensor_scale=1.0) -> "
     "(codes, scales, zeros or None), as the op of this name."},
    {"dequantize_by", (PyCFunction)(void (*)(void))kvc_py_dequantize_by, METH_VARARGS | METH_KEYWORDS,
     "dequantize_by(codes, scales, zeros, scheme, granularity, group=0, packing=0, tensor_scale=1.0) -> float32."},
    {NULL, NULL, 0, NULL}};

static int execute(PyObject *module)
{
    import_array1(-1);
    if (PyModule_AddStringConstant(module, "__version__", KVC_VERSION) < 0) return -1;
    if (PyModule_AddIntMacro(module, KVC_MAX_DIM) < 0) return -1;
    if (kvc_py_add_pool(module) < 0) return -1;
    if (kvc_py_add_prefix(module) < 0) return -1;
    if (kvc_py_add_table(module) < 0) return -1;
    return kvc_py_add_held(module);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)execute}, {0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "kvcompress._C", "The C core of kvcompress.", 0, functions, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__C(void);
PyMODINIT_FUNC PyInit__C(void) { return PyModuleDef_Init(&definition); }
