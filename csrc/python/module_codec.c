/* module_codec.c - codecs on NumPy arrays. */
#include "module.h"

static int float_type(PyArrayObject *array, const char *what, kvc_dtype *dtype)
{
    int type = PyArray_TYPE(array);
    if (type == NPY_FLOAT32 || type == NPY_FLOAT16) {
        *dtype = type == NPY_FLOAT32 ? KVC_F32 : KVC_F16;
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "%s: expected float32 or float16, got %S", what, PyArray_DESCR(array));
    return -1;
}

static int check_quantized(const char *what, int format)
{
    if (format >= 0 && format < KVC_FORMATS && !kvc_format_is_raw(format)) return 0;
    PyErr_Format(PyExc_ValueError, "%s: format: expected a quantized format's code, got %d", what, format);
    return -1;
}

PyObject *kvc_py_quantize(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"x", "format", NULL};
    PyObject *object, *codes = NULL, *scales = NULL;
    PyArrayObject *x = NULL;
    kvc_dtype dtype;
    npy_intp size[NPY_MAXDIMS];
    int format;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!i", names, &PyArray_Type, &object, &format)) return NULL;
    if (check_quantized("quantize", format) < 0 || float_type((PyArrayObject *)object, "quantize: x", &dtype) < 0)
        return NULL;
    if (!(x = kvc_py_array(object, "quantize: x", PyArray_TYPE((PyArrayObject *)object), -1))) return NULL;
    int nd = PyArray_NDIM(x);
    if (nd < 1 || PyArray_SIZE(x) == 0) {
        PyErr_Format(PyExc_ValueError, "quantize: x: expected [..., D] with at least one element, got %d dimensions",
                     nd);
        goto fail;
    }
    npy_intp D = PyArray_DIM(x, nd - 1), rows = PyArray_SIZE(x) / D;
    for (int i = 0; i < nd; i++) size[i] = PyArray_DIM(x, i);
    size[nd - 1] = D * kvc_format_bits(format) / 8;
    codes = PyArray_SimpleNew(nd, size, NPY_UINT8);
    kvc_traits traits = kvc_format_traits(format);
    npy_intp planes = (npy_intp)kvc_meta_planes(traits, D);
    size[nd - 1] = planes;
    scales = PyArray_SimpleNew(nd - (planes == 1), size, kvc_meta_size(traits) == 2 ? NPY_FLOAT16 : NPY_UINT8);
    if (!codes || !scales) goto fail;
    kvc_status status;
    void *from = PyArray_DATA(x), *to = PyArray_DATA((PyArrayObject *)codes),
         *meta = PyArray_DATA((PyArrayObject *)scales);
    Py_BEGIN_ALLOW_THREADS status = kvc_quantize(format, dtype, from, rows, D, to, meta, NULL);
    Py_END_ALLOW_THREADS if (status != KVC_OK)
    {
        kvc_py_raise(status);
        goto fail;
    }
    Py_DECREF(x);
    return Py_BuildValue("(NN)", codes, scales);
fail:
    Py_XDECREF(x);
    Py_XDECREF(codes);
    Py_XDECREF(scales);
    return NULL;
}

PyObject *kvc_py_dequantize(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"codes", "scales", "format", NULL};
    PyObject *code_object, *scale_object, *x = NULL;
    PyArrayObject *codes = NULL, *scales = NULL;
    npy_intp size[NPY_MAXDIMS];
    int format;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOi", names, &code_object, &scale_object, &format)) return NULL;
    if (check_quantized("dequantize", format) < 0) return NULL;
    codes = kvc_py_array(code_object, "dequantize: codes", NPY_UINT8, -1);
    kvc_traits traits = kvc_format_traits(format);
    int type = kvc_meta_size(traits) == 2 ? NPY_FLOAT16 : NPY_UINT8;
    if (codes) scales = kvc_py_array(scale_object, "dequantize: scales", type, -1);
    if (!scales) goto fail;
    int nd = PyArray_NDIM(codes);
    npy_intp D = nd >= 1 ? PyArray_DIM(codes, nd - 1) * 8 / traits.bits : 0;
    npy_intp planes = (npy_intp)kvc_meta_planes(traits, D);
    bool fits = nd >= 1 && PyArray_NDIM(scales) == nd - (planes == 1);
    if (fits && planes != 1) fits = PyArray_DIM(scales, nd - 1) == planes;
    for (int i = 0; fits && i < nd - 1; i++) fits = PyArray_DIM(codes, i) == PyArray_DIM(scales, i);
    if (!fits || PyArray_SIZE(codes) == 0) {
        PyErr_SetString(PyExc_ValueError,
                        "dequantize: expected codes [..., D * bits / 8], not empty, and scales of the "
                        "same rows, as quantize gives them");
        goto fail;
    }
    for (int i = 0; i < nd; i++) size[i] = PyArray_DIM(codes, i);
    npy_intp rows = PyArray_SIZE(codes) / size[nd - 1];
    size[nd - 1] = D;
    if (!(x = PyArray_SimpleNew(nd, size, NPY_FLOAT32))) goto fail;
    kvc_status status;
    void *from = PyArray_DATA(codes), *meta = PyArray_DATA(scales), *to = PyArray_DATA((PyArrayObject *)x);
    Py_BEGIN_ALLOW_THREADS status = kvc_dequantize(format, from, meta, rows, D, to, NULL);
    Py_END_ALLOW_THREADS if (status != KVC_OK)
    {
        Py_CLEAR(x);
        kvc_py_raise(status);
    }
fail:
    Py_XDECREF(codes);
    Py_XDECREF(scales);
    return x;
}

int kvc_py_dense(PyObject *object, const char *what, kvc_dense *out)
{
    PyArrayObject *x = (PyArrayObject *)object;
    if (float_type(x, what, &out->dtype) < 0) return -1;
    npy_intp item = out->dtype == KVC_F32 ? 4 : 2;
    bool fits = PyArray_NDIM(x) == 4 && PyArray_ISBEHAVED_RO(x) && PyArray_SIZE(x) > 0;
    for (int d = 0; fits && d < 3; d++) {
        fits = PyArray_STRIDE(x, d) % item == 0;
        out->stride[d] = PyArray_STRIDE(x, d) / item;
    }
    if (!fits || (PyArray_DIM(x, 3) > 1 && PyArray_STRIDE(x, 3) != item)) {
        kvc_py_refuse(what, "[B, H, T, D], not empty, with a contiguous last dimension", x);
        return -1;
    }
    out->data = PyArray_DATA(x);
    return 0;
}

PyObject *kvc_py_pack(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"k", "v", "key", "value", "page_size", NULL};
    PyObject *k_object, *v_object;
    int key, value;
    long long page_size = 64;
    kvc_dense k, v;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!O!ii|L", names, &PyArray_Type, &k_object, &PyArray_Type,
                                     &v_object, &key, &value, &page_size))
        return NULL;
    if (kvc_py_dense(k_object, "pack: k", &k) < 0 || kvc_py_dense(v_object, "pack: v", &v) < 0) return NULL;
    const npy_intp *ks = PyArray_DIMS((PyArrayObject *)k_object), *vs = PyArray_DIMS((PyArrayObject *)v_object);
    if (ks[0] != vs[0] || ks[1] != vs[1] || ks[2] != vs[2])
        return PyErr_Format(PyExc_ValueError, "pack: v: expected B, H, T as k has, got another shape");
    int64_t bytes = kvc_page_bytes(key, value, ks[3], vs[3], page_size);
    if (!bytes) return kvc_py_raise(KVC_E_VALUE);
    npy_intp size[4] = {ks[0], ks[2] / page_size, ks[1], bytes};
    PyObject *pages = PyArray_SimpleNew(4, size, NPY_UINT8);
    if (!pages) return NULL;
    void *to = PyArray_DATA((PyArrayObject *)pages);
    kvc_status status;
    Py_BEGIN_ALLOW_THREADS status =
        kvc_pack(key, value, &k, &v, ks[0], ks[1], ks[2], ks[3], vs[3], page_size, to, NULL);
    Py_END_ALLOW_THREADS if (status != KVC_OK)
    {
        Py_CLEAR(pages);
        return kvc_py_raise(status);
    }
    return pages;
}
