/* module.h - shared by the files of kvcompress._C: CPython's limited API, NumPy's C API, errors. */
#ifndef KVC_MODULE_H
#define KVC_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL kvc_numpy
#ifndef KVC_IMPORT_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include "kvc.h"

typedef struct kvc_py_pool {
    PyObject_HEAD kvc_pool *pool;
    int shared; /* the pool shares its address space with other pools */
} kvc_py_pool;

typedef struct kvc_py_table {
    PyObject_HEAD kvc_table *table;
    PyObject *pool;
} kvc_py_table;

extern PyTypeObject *kvc_py_pool_type, *kvc_py_table_type;

/* Sets the Python exception for a failed core call; returns NULL. */
PyObject *kvc_py_raise(kvc_status status);
/* Returns None on success, or sets the exception. */
PyObject *kvc_py_done(kvc_status status);
/* An array over memory that `base` (reference stolen) keeps alive. Writable, because torch.from_numpy requires it. */
PyObject *kvc_py_view(int nd, const npy_intp *size, int type, void *data, PyObject *base);
/* New reference to `object` as a C-contiguous array of `type` and rank nd (< 0: any), or NULL with a TypeError or
 * ValueError that names `what`. No conversion: the dtype must be the one asked for. */
PyArrayObject *kvc_py_array(PyObject *object, const char *what, int type, int nd);
/* Sets a ValueError that describes the memory layout of the array. */
void kvc_py_refuse(const char *what, const char *wanted, PyArrayObject *array);

/* 0, or -1 with a ValueError: the array shares no memory with the pool's arena, nor with the table's arrays (NULL: none). */
int kvc_py_apart(PyArrayObject *array, const char *what, const kvc_pool *pool, const kvc_table *table);

/* An array as a strided [B, H, T, D] whose last dim is contiguous; 0, or -1 with an error. */
int kvc_py_dense(PyObject *object, const char *what, kvc_dense *out);

/* module_evict.c: methods of Table, and functions */
PyObject *kvc_py_tokens(kvc_py_table *self, PyObject *runs);
PyObject *kvc_py_means(kvc_py_table *self, PyObject *const *args, Py_ssize_t n);
PyObject *kvc_py_keep(PyObject *module, PyObject *const *args, Py_ssize_t n);
PyObject *kvc_py_smooth(PyObject *module, PyObject *const *args, Py_ssize_t n);
PyObject *kvc_py_drop(kvc_py_table *self, PyObject *const *args, Py_ssize_t n);
PyObject *kvc_py_plan_evict(kvc_py_table *self, PyObject *const *args, Py_ssize_t n_args);
PyObject *kvc_py_observe(kvc_py_table *self, PyObject *const *args, Py_ssize_t n);
PyObject *kvc_py_restore(kvc_py_table *self, PyObject *args);
/* module_step.c */
PyObject *kvc_py_bind_tensors(PyObject *module, PyObject *type);
PyObject *kvc_py_takes(kvc_py_table *self, PyObject *const *args, Py_ssize_t n);
PyObject *kvc_py_step(kvc_py_table *self, PyObject *const *args, Py_ssize_t n);
/* module_codec.c */
PyObject *kvc_py_quantize(PyObject *module, PyObject *args, PyObject *keywords);
PyObject *kvc_py_dequantize(PyObject *module, PyObject *args, PyObject *keywords);
PyObject *kvc_py_pack(PyObject *module, PyObject *args, PyObject *keywords);
/* module_granular.c */
PyObject *kvc_py_schemes(PyObject *module, PyObject *unused);
PyObject *kvc_py_quantize_by(PyObject *module, PyObject *args, PyObject *keywords);
PyObject *kvc_py_dequantize_by(PyObject *module, PyObject *args, PyObject *keywords);
/* module_prefix.c */
PyObject *kvc_py_sha256(PyObject *module, PyObject *data);
PyObject *kvc_py_gather(PyObject *module, PyObject *args);
PyObject *kvc_py_scatter(PyObject *module, PyObject *args);
PyObject *kvc_py_checksum(PyObject *module, PyObject *memory);
/* module_held.c, module_pool.c, module_table.c, module_prefix.c: create the types; 0 or -1 */
int kvc_py_add_held(PyObject *module);
int kvc_py_add_prefix(PyObject *module);
int kvc_py_add_pool(PyObject *module);
int kvc_py_add_table(PyObject *module);

#endif
