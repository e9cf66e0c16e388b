/* module_step.c - Table.step: plan, attention and commit of an append that seals no pages, in one call, with torch
 * tensors accessed through DLPack's C exchange API. Calls it does not support go through the op `attend`, which reports
 * errors.
 *
 * Why: after a layer's weights have been read, the code of torch's dispatcher and of our Python is no longer in cache.
 * The op and the Python around it then take as long as attention to thousands of tokens; see docs/decisions.md, 169. */
#include "module.h"
#include "base/alloc.h"
#include "base/status.h"
#include "dlpack.h"
#include "ops.h"

#include <math.h>

#define MOST 1e38 /* limit for scale and softcap, as in kvcompress/checks.py */

static PyTypeObject *tensor_type; /* torch.Tensor itself: subclasses are not supported */
static const kvc_dl_exchange *torch_api;

PyObject *kvc_py_bind_tensors(PyObject *module, PyObject *type)
{
    (void)module;
    PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    const kvc_dl_exchange *api = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
    Py_XDECREF(capsule); /* the struct it points to is static */
    PyErr_Clear();       /* older versions of torch have none */
    if (!api || api->major != KVC_DL_VERSION || !api->describe) Py_RETURN_FALSE;
    if (!tensor_type) tensor_type = (PyTypeObject *)Py_NewRef(type);
    torch_api = api;
    Py_RETURN_TRUE;
}

/* A dense floating-point tensor [B, H, T, D] with a contiguous last dim, on the CPU or, if `device` >= 0, on that GPU,
 * which does not overlap the arena. DLPack does not report torch's negation bit; public torch functions create negated
 * views only of complex numbers, with even strides. */
static bool take(const kvc_table *table, PyObject *object, int64_t device, kvc_dl_tensor *t, kvc_dense *dense)
{
    if (!torch_api || Py_TYPE(object) != tensor_type) return false;
    if (torch_api->describe(object, t) != 0) {
        PyErr_Clear();
        return false;
    }
    int bits = t->dtype.bits;
    bool half = bits == 16 && (t->dtype.code == KVC_DL_FLOAT || t->dtype.code == KVC_DL_BFLOAT);
    if (t->device_type != (device < 0 ? KVC_DL_CPU : KVC_DL_CUDA) || (device >= 0 && t->device_id != device))
        return false;
    if (t->ndim != 4 || t->dtype.lanes != 1 || !t->data) return false;
    if (!half && !(bits == 32 && t->dtype.code == KVC_DL_FLOAT)) return false;
    int64_t last = 0;
    for (int i = 0; i < 4; i++) {
        if (t->shape[i] < 1) return false;
        last += (t->shape[i] - 1) * t->strides[i];
    }
    if (t->shape[3] > 1 && t->strides[3] != 1) return false;
    uint8_t *arena = kvc_pool_base(table->pool), *begin = (uint8_t *)t->data + t->byte_offset;
    if (device < 0 && begin + (last + 1) * bits / 8 > arena && begin < arena + kvc_pool_extent(table->pool))
        return false;
    *dense = (kvc_dense){begin,
                         {t->strides[0], t->strides[1], t->strides[2]},
                         !half                            ? KVC_F32
                         : t->dtype.code == KVC_DL_BFLOAT ? KVC_BF16
                                                          : KVC_F16};
    return true;
}

static bool is_shape(const kvc_dl_tensor *t, int64_t B, int64_t H, int64_t T, int64_t D)
{
    return t->shape[0] == B && t->shape[1] == H && t->shape[2] == T && t->shape[3] == D;
}

static bool take_pair(const kvc_table *table, PyObject *const *pair, int64_t device, kvc_attend_args *a)
{
    const kvc_spec *s = &table->spec;
    kvc_dl_tensor k, v;
    if (!take(table, pair[0], device, &k, &a->k) || !take(table, pair[1], device, &v, &a->v)) return false;
    a->T = k.shape[2];
    return is_shape(&k, table->batch, s->heads, a->T, s->key_dim) &&
           is_shape(&v, table->batch, s->heads, a->T, s->value_dim) && a->k.dtype == a->v.dtype &&
           (int)a->k.dtype == s->raw; /* raw formats are in the order of dtypes */
}

static bool take_query(const kvc_table *table, PyObject *object, kvc_dl_tensor *q, kvc_attend_args *a)
{
    if (!take(table, object, -1, q, &a->q)) return false;
    a->query_heads = q->shape[1];
    a->Tq = q->shape[2];
    return is_shape(q, table->batch, a->query_heads, a->Tq, table->spec.key_dim);
}

/* scale, window, softcap: plain numbers in range. A layer may pass a window below 0 (chunked attention). */
static bool take_numbers(PyObject *const *args, kvc_attend_args *a)
{
    if (!PyFloat_CheckExact(args[0]) || !PyLong_CheckExact(args[1]) || !PyFloat_CheckExact(args[2])) return false;
    int over;
    double scale = PyFloat_AsDouble(args[0]), softcap = PyFloat_AsDouble(args[2]);
    a->window = PyLong_AsLongLongAndOverflow(args[1], &over);
    a->scale = (float)scale;
    a->softcap = (float)softcap;
    return !over && a->window >= INT32_MIN && a->window <= INT32_MAX && fabs(scale) <= MOST && softcap >= 0 &&
           softcap <= MOST;
}

/* A layer's matrices (key, query, value, back), each fp32 [H, D, D], contiguous, on the CPU; NULL if it has none. */
static bool take_maps(const kvc_table *table, PyObject *maps, const float *by[4])
{
    if (maps == Py_None) return true;
    if (!PyTuple_CheckExact(maps) || PyTuple_Size(maps) != 4) return false;
    for (int i = 0; i < 4; i++) {
        PyObject *map = PyTuple_GetItem(maps, i);
        kvc_dl_tensor t;
        if (Py_TYPE(map) != tensor_type || torch_api->describe(map, &t) != 0) {
            PyErr_Clear();
            return false;
        }
        int64_t D = i < 2 ? table->spec.key_dim : table->spec.value_dim;
        bool right = t.device_type == KVC_DL_CPU && t.dtype.code == KVC_DL_FLOAT && t.dtype.bits == 32 && t.data &&
                     t.dtype.lanes == 1 && t.ndim == 3 && t.shape[0] == table->spec.heads && t.shape[1] == D &&
                     t.shape[2] == D && t.strides[0] == D * D && t.strides[1] == D && t.strides[2] == 1;
        if (!right) return false;
        by[i] = (const float *)((const uint8_t *)t.data + t.byte_offset);
    }
    return true;
}

PyObject *kvc_py_takes(kvc_py_table *self, PyObject *const *args, Py_ssize_t n)
{
    kvc_attend_args a;
    if (n != 2 && n != 3)
        return PyErr_Format(PyExc_TypeError, "takes: expected (k, v, device=-1), got %zd arguments", n);
    long long device = n == 3 ? PyLong_AsLongLong(args[2]) : -1;
    if (device == -1 && PyErr_Occurred()) return NULL;
    return PyLong_FromLongLong(take_pair(self->table, args, device, &a) ? a.T : 0);
}

static void refused(void *context, const char *kind, const char *message) { (void)context, (void)kind, (void)message; }

static void drop(kvc_dl_managed **made)
{
    if (*made && (*made)->deleter) (*made)->deleter(*made);
    *made = NULL;
}

/* A new contiguous tensor of `like`'s dtype (fp32 if NULL); returns its memory. NULL if out of memory, or if torch
 * returns another kind of tensor, as its transforms and modes do. */
static void *new_tensor(const kvc_dl_tensor *like, int ndim, int64_t *size, kvc_dl_managed **out)
{
    kvc_dl_tensor asked = {.device_type = KVC_DL_CPU, .ndim = ndim, .shape = size, .dtype = {KVC_DL_FLOAT, 32, 1}};
    int64_t step = 1;
    if (like) asked.dtype = like->dtype;
    if (torch_api->allocate(&asked, out, NULL, refused) != 0) *out = NULL;
    if (!*out) return NULL;
    const kvc_dl_tensor *t = &(*out)->tensor;
    bool same = t->data && t->device_type == KVC_DL_CPU && t->ndim == ndim && t->dtype.code == asked.dtype.code &&
                t->dtype.bits == asked.dtype.bits && t->dtype.lanes == 1;
    for (int d = ndim - 1; d >= 0 && same; step *= size[d--])
        same = t->shape[d] == size[d] && (size[d] == 1 || !t->strides || t->strides[d] == step);
    if (same) return (uint8_t *)t->data + t->byte_offset;
    drop(out);
    return NULL;
}

/* kvc_attend of one token per row, transformed by the matrices `by`. */
static kvc_status attend_mapped(const kvc_table *table, kvc_attend_args *a, const float *const by[4])
{
    int64_t B = table->batch, H = table->spec.heads, Hq = a->query_heads, Dk = table->spec.key_dim,
            Dv = table->spec.value_dim, width = a->k.dtype == KVC_F32 ? 4 : 2;
    void *const result = a->out.data;
    kvc_dtype dtype = a->out.dtype;
    float *q;
    KVC_TRY(kvc_scratch(B * (Hq + H) * (Dk + Dv), sizeof *q, &q));
    float *out = q + B * Hq * Dk;
    uint8_t *k = (uint8_t *)(out + B * Hq * Dv), *v = k + B * H * Dk * width;
    kvc_status status = kvc_map_heads(&a->q, B, Hq, 1, Dk, by[1], H, q, KVC_F32, &a->exec);
    if (status == KVC_OK) status = kvc_map_heads(&a->k, B, H, 1, Dk, by[0], H, k, a->k.dtype, &a->exec);
    if (status == KVC_OK) status = kvc_map_heads(&a->v, B, H, 1, Dv, by[2], H, v, a->v.dtype, &a->exec);
    a->q = (kvc_dense){q, {Hq * Dk, Dk, Dk}, KVC_F32};
    a->k = (kvc_dense){k, {H * Dk, Dk, Dk}, a->k.dtype};
    a->v = (kvc_dense){v, {H * Dv, Dv, Dv}, a->v.dtype};
    a->out = (kvc_dense){out, {Hq * Dv, Dv, Hq * Dv}, KVC_F32};
    if (status == KVC_OK) status = kvc_attend(a);
    kvc_dense mapped = {out, {Hq * Dv, Dv, Dv}, KVC_F32};
    if (status == KVC_OK) status = kvc_map_heads(&mapped, B, Hq, 1, Dv, by[3], H, result, dtype, &a->exec);
    kvc_scratch_free(q);
    return status;
}

/* Attention for the planned append; writes its tokens. */
static kvc_status run(const kvc_table *table, kvc_attend_args *a, const float *const by[4])
{
    kvc_status status;
    a->seen = table->seen;
    a->exec = kvc_op_exec;
    a->store = kvc_table_store(table);
    Py_BEGIN_ALLOW_THREADS /* the GIL can be released: a table with a plan refuses changes that move its arrays */
        status = by[0] ? attend_mapped(table, a, by) : kvc_attend(a);
    Py_END_ALLOW_THREADS return status;
}

/* Returns (out, lse). Torch owns the tensors from here on, also on failure. */
static PyObject *hand_over(kvc_dl_managed *made[2])
{
    PyObject *pair[2] = {NULL, NULL}, *result = NULL;
    bool done = true;
    for (int i = 0; i < 2; i++) {
        kvc_dl_managed *one = made[i];
        made[i] = NULL;
        done = torch_api->to_object(one, (void **)&pair[i]) == 0 && pair[i] && done;
    }
    if (done) result = PyTuple_Pack(2, pair[0], pair[1]);
    Py_XDECREF(pair[0]);
    Py_XDECREF(pair[1]);
    if (result) return result;
    PyErr_Clear(); /* torch raises a RuntimeError instead */
    return PyErr_NoMemory();
}

/* Plans an append of a.T tokens. Returns false, without a plan, if it would seal pages (the checkpoint must hold them),
 * or if the pool has grown over memory that `take` did not check against. */
static bool plan(kvc_table *table, int64_t T, kvc_status *status)
{
    int64_t extent = kvc_pool_extent(table->pool), seals;
    *status = kvc_table_plan(table, T, NULL);
    if (*status != KVC_OK) return false;
    kvc_table_seals(table, &seals);
    if (!seals && extent == kvc_pool_extent(table->pool)) return true;
    kvc_table_rollback(table);
    return false;
}

PyObject *kvc_py_step(kvc_py_table *self, PyObject *const *args, Py_ssize_t n)
{
    kvc_table *table = self->table;
    kvc_attend_args a = {0};
    kvc_dl_managed *made[2] = {NULL, NULL};
    kvc_dl_tensor q;
    kvc_status status = KVC_OK;
    PyObject *result = NULL;
    const float *by[4] = {NULL};
    if (n != 7)
        return PyErr_Format(PyExc_TypeError,
                            "step: expected (q, k, v, scale, window, softcap, maps), got %zd arguments", n);
    if (!take_pair(table, args + 1, -1, &a) || !take_query(table, args[0], &q, &a) || a.Tq != a.T ||
        !take_numbers(args + 3, &a) || !take_maps(table, args[6], by) || (by[0] && a.T > 1))
        Py_RETURN_NONE;
    int64_t Dv = table->spec.value_dim,
            sizes[2][4] = {{table->batch, a.T, a.query_heads, Dv}, {table->batch, a.query_heads, a.T}};
    a.out = (kvc_dense){
        new_tensor(&q, 4, sizes[0], &made[0]), {a.T * a.query_heads * Dv, Dv, a.query_heads * Dv}, a.q.dtype};
    a.lse = a.out.data ? new_tensor(NULL, 3, sizes[1], &made[1]) : NULL;
    bool planned = a.lse && plan(table, a.T, &status);
    if (planned) {
        status = run(table, &a, by);
        if (status == KVC_OK) result = hand_over(made);
        if (result)
            kvc_table_commit(table);
        else
            kvc_table_rollback(table);
    }
    drop(&made[0]);
    drop(&made[1]);
    if (status != KVC_OK) return kvc_py_raise(status);
    if (planned) return result;
    PyErr_Clear(); /* MemoryError: retried and reported by the op */
    Py_RETURN_NONE;
}
