/* module_granular.c - quantization by any granularity on NumPy arrays. */
#include "module.h"

#include "granular.h"

PyObject *kvc_py_schemes(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    PyObject *all = PyTuple_New(KVC_SCHEMES);
    for (int i = 0; all && i < KVC_SCHEMES; i++) {
        const kvc_scheme_info *f = kvc_scheme_get(i);
        PyObject *one =
            Py_BuildValue("{s:i,s:s,s:i,s:i,s:O,s:O,s:s}", "code", i, "name", f->name, "bits", f->bits, "group",
                          f->group, "zero_point", f->coding == KVC_CODING_UINT ? Py_True : Py_False, "block_scale",
                          f->scale != KVC_SCALE_F16 ? Py_True : Py_False, "about", f->about);
        if (!one || PyTuple_SetItem(all, i, one) < 0) Py_CLEAR(all);
    }
    return all;
}

/* Checks for a contiguous array of the scales' shape; NULL with an exception otherwise. */
static PyArrayObject *scale_array(PyObject *object, const char *what, int type, const kvc_grain_sizes *sizes)
{
    PyArrayObject *array = kvc_py_array(object, what, type, 4);
    for (int i = 0; array && i < 4; i++)
        if (PyArray_DIM(array, i) != sizes->scales[i]) {
            PyErr_Format(PyExc_ValueError, "%s: expected %lld in dimension %d, got %lld", what,
                         (long long)sizes->scales[i], i, (long long)PyArray_DIM(array, i));
            Py_CLEAR(array);
        }
    return array;
}

static void *data_of(PyArrayObject *array) { return array ? PyArray_DATA(array) : NULL; }

PyObject *kvc_py_quantize_by(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"x", "scheme", "granularity", "group", "packing", "scale", "zero", "tensor_scale", NULL};
    PyObject *object, *scale_object = Py_None, *zero_object = Py_None, *out[3] = {NULL, NULL, NULL};
    PyArrayObject *scale = NULL, *zero = NULL;
    kvc_grain grain = {0};
    kvc_grain_sizes sizes;
    kvc_dense x;
    long long group = 0;
    float factor = 1;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!ii|LiOOf", names, &PyArray_Type, &object, &grain.scheme,
                                     &grain.by, &group, &grain.packing, &scale_object, &zero_object, &factor))
        return NULL;
    if (kvc_py_dense(object, "quantize_by: x", &x) < 0) return NULL;
    const npy_intp *size = PyArray_DIMS((PyArrayObject *)object);
    grain = (kvc_grain){grain.scheme, grain.by, grain.packing, group, size[0], size[1], size[2], size[3]};
    kvc_status status = kvc_grain_check(&grain, &sizes);
    if (status != KVC_OK) return kvc_py_raise(status);
    if (scale_object != Py_None && !(scale = scale_array(scale_object, "quantize_by: scale", NPY_FLOAT32, &sizes)))
        goto fail;
    if (zero_object != Py_None && !(zero = scale_array(zero_object, "quantize_by: zero", NPY_FLOAT32, &sizes)))
        goto fail;
    npy_intp code_size[4] = {size[0], size[1], size[2], sizes.row_bytes}, scale_size[4];
    for (int i = 0; i < 4; i++) scale_size[i] = sizes.scales[i];
    bool asymmetric = kvc_scheme_get(grain.scheme)->coding == KVC_CODING_UINT;
    out[0] = PyArray_SimpleNew(4, code_size, NPY_UINT8);
    out[1] = PyArray_SimpleNew(4, scale_size, sizes.scale_bytes == 2 ? NPY_FLOAT16 : NPY_UINT8);
    out[2] = asymmetric ? PyArray_SimpleNew(4, scale_size, NPY_FLOAT16) : Py_NewRef(Py_None);
    if (!out[0] || !out[1] || !out[2]) goto fail;
    uint8_t *codes = PyArray_DATA((PyArrayObject *)out[0]), *scales = PyArray_DATA((PyArrayObject *)out[1]);
    uint16_t *zeros = asymmetric ? PyArray_DATA((PyArrayObject *)out[2]) : NULL;
    Py_BEGIN_ALLOW_THREADS status =
        kvc_quantize_by(&grain, &x, data_of(scale), data_of(zero), factor, codes, scales, zeros, NULL);
    Py_END_ALLOW_THREADS if (status != KVC_OK)
    {
        kvc_py_raise(status);
        goto fail;
    }
    Py_XDECREF(scale);
    Py_XDECREF(zero);
    return Py_BuildValue("(NNN)", out[0], out[1], out[2]);
fail:
    Py_XDECREF(scale);
    Py_XDECREF(zero);
    for (int i = 0; i < 3; i++) Py_XDECREF(out[i]);
    return NULL;
}

PyObject *kvc_py_dequantize_by(PyObject *module, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"codes", "scales",  "zeros",        "scheme", "granularity",
                            "group", "packing", "tensor_scale", NULL};
    PyObject *code_object, *scale_object, *zero_object, *x = NULL;
    PyArrayObject *codes = NULL, *scales = NULL, *zeros = NULL;
    kvc_grain grain = {0};
    kvc_grain_sizes sizes;
    long long group = 0;
    float factor = 1;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OOOii|Lif", names, &code_object, &scale_object, &zero_object,
                                     &grain.scheme, &grain.by, &group, &grain.packing, &factor))
        return NULL;
    if (!(codes = kvc_py_array(code_object, "dequantize_by: codes", NPY_UINT8, 4))) return NULL;
    const kvc_scheme_info *scheme = kvc_scheme_get(grain.scheme);
    npy_intp size[4];
    for (int i = 0; i < 4; i++) size[i] = PyArray_DIM(codes, i);
    if (scheme && size[3] * 8 % scheme->bits) {
        PyErr_Format(PyExc_ValueError, "dequantize_by: codes: expected whole elements of %d bits a row, got %lld bytes",
                     scheme->bits, (long long)size[3]);
        goto fail;
    }
    if (scheme) size[3] = size[3] * 8 / scheme->bits;
    grain = (kvc_grain){grain.scheme, grain.by, grain.packing, group, size[0], size[1], size[2], size[3]};
    kvc_status status = kvc_grain_check(&grain, &sizes);
    if (status != KVC_OK) {
        kvc_py_raise(status);
        goto fail;
    }
    int type = sizes.scale_bytes == 2 ? NPY_FLOAT16 : NPY_UINT8;
    if (!(scales = scale_array(scale_object, "dequantize_by: scales", type, &sizes))) goto fail;
    if (scheme->coding == KVC_CODING_UINT &&
        !(zeros = scale_array(zero_object, "dequantize_by: zeros", NPY_FLOAT16, &sizes)))
        goto fail;
    if (!(x = PyArray_SimpleNew(4, size, NPY_FLOAT32))) goto fail;
    const void *from = PyArray_DATA(codes), *meta = PyArray_DATA(scales), *points = data_of(zeros);
    void *to = PyArray_DATA((PyArrayObject *)x);
    Py_BEGIN_ALLOW_THREADS status = kvc_dequantize_by(&grain, from, meta, points, factor, to, NULL);
    Py_END_ALLOW_THREADS if (status != KVC_OK)
    {
        Py_CLEAR(x);
        kvc_py_raise(status);
    }
fail:
    Py_XDECREF(codes);
    Py_XDECREF(scales);
    Py_XDECREF(zeros);
    return x;
}
