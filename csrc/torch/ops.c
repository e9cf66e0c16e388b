/* ops.c - the table of op schemas, and conversion between torch's stack and C. */
#include "ops.h"
#include "base/status.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

/* X(name, kinds, schema): the list of all ops. */
#define KVC_OPS(X)                                                                                                     \
    X(quantize, "Ti", "(Tensor x, int format) -> (Tensor codes, Tensor scales)")                                       \
    X(dequantize, "TTi", "(Tensor codes, Tensor scales, int format) -> Tensor")                                        \
    X(pack, "TTiii", "(Tensor k, Tensor v, int key, int value, int page_size) -> Tensor")                              \
    X(quantize_by, "TTTTiiii",                                                                                         \
      "(Tensor x, Tensor scale, Tensor zero, Tensor tensor_scale, int scheme, int granularity, int group, "            \
      "int packing) -> (Tensor codes, Tensor scales, Tensor zeros)")                                                   \
    X(dequantize_by, "TTTTiiii",                                                                                       \
      "(Tensor codes, Tensor scales, Tensor zeros, Tensor tensor_scale, int scheme, int granularity, int group, "      \
      "int packing) -> Tensor")                                                                                        \
    X(pack_codes, "TTTTiii",                                                                                           \
      "(Tensor k, Tensor v, Tensor k_scales, Tensor v_scales, int key, int value, int page_size) -> Tensor")           \
    X(map_heads, "TTT", "(Tensor x, Tensor by, Tensor like) -> Tensor")                                                \
    X(read, "TTTTTiiiiii",                                                                                             \
      "(Tensor like, Tensor arena, Tensor table, Tensor rows, Tensor slots, int heads, int key_dim, int value_dim, "   \
      "int width, int page_size, int sinks) -> (Tensor k, Tensor v)")                                                  \
    X(select, "TTTT", "(Tensor scores, Tensor slots, Tensor protect, Tensor budget) -> Tensor")                        \
    X(share, "TTTTT", "(Tensor scores, Tensor slots, Tensor protect, Tensor total, Tensor floor) -> Tensor")           \
    X(score_tokens, "TTTTiiiiiii",                                                                                     \
      "(Tensor arena, Tensor table, Tensor rows, Tensor slots, int heads, int key_dim, int value_dim, int width, "     \
      "int page_size, int sinks, int kind) -> Tensor")                                                                 \
    X(compact, "WTiiiiii",                                                                                             \
      "(Tensor(a!) arena, Tensor moves, int heads, int table_heads, int key_dim, int value_dim, int page_size, "       \
      "int sinks) -> ()")                                                                                              \
    X(attend, "TTTWTTTTTTiiiiffii",                                                                                    \
      "(Tensor q, Tensor k, Tensor v, Tensor(a!) arena, Tensor table, Tensor rows, Tensor slots, Tensor mask, "        \
      "Tensor s_aux, Tensor seals, int seen, int page_size, int sinks, int window, float scale, float softcap, "       \
      "int attention_width=0, int formats=0) -> (Tensor out, Tensor lse, Tensor attention)")                           \
    X(attend_step, "TTTWTTTTTTTiiiffiiT",                                                                              \
      "(Tensor q, Tensor k, Tensor v, Tensor(a!) arena, Tensor table, Tensor rows, Tensor slots, Tensor mask, "        \
      "Tensor s_aux, Tensor seals, Tensor seen, int page_size, int sinks, int window, float scale, float softcap, "    \
      "int attention_width, int formats, Tensor counters) -> (Tensor out, Tensor lse, Tensor attention)")              \
    X(accumulate_attention, "TTTWTTTTTTiiiiffi",                                                                       \
      "(Tensor q, Tensor k, Tensor v, Tensor(a!) arena, Tensor table, Tensor rows, Tensor slots, Tensor mask, "        \
      "Tensor lse, Tensor seals, int seen, int page_size, int sinks, int window, float scale, float softcap, "         \
      "int attention_width) -> Tensor")                                                                                \
    X(attend_feedback, "TTTWTTTTTTiiiiffiiTT",                                                                         \
      "(Tensor q, Tensor k, Tensor v, Tensor(a!) arena, Tensor table, Tensor rows, Tensor slots, Tensor mask, "        \
      "Tensor s_aux, Tensor seals, int seen, int page_size, int sinks, int window, float scale, float softcap, "       \
      "int attention_width, int formats, Tensor key_feedback, Tensor value_feedback) "                                 \
      "-> (Tensor out, Tensor lse, Tensor attention)")                                                                 \
    X(attend_varlen, "TTTBTBTTTTTTWWWiiiiiffi",                                                                        \
      "(Tensor q, Tensor k, Tensor v, Tensor(a!) cache, Tensor block_table, Tensor(b!) residual, "                     \
      "Tensor residual_table, Tensor query_start_loc, Tensor seq_lens, Tensor sealed_lens, Tensor draft_lens, "        \
      "Tensor s_aux, Tensor(c!) out, Tensor(d!) lse, Tensor(e!) flags, int formats, int block_size, "                  \
      "int residual_size, int page_size, int window, float scale, float softcap, int max_query_len=0) -> ()")          \
    X(store_tokens, "TTBTBiii",                                                                                        \
      "(Tensor k, Tensor v, Tensor(a!) cache, Tensor slot_mapping, Tensor(b!) flag, int formats, int block_size, "     \
      "int page_size) -> ()")

enum {
#define X(name, kinds, schema) OP_##name,
    KVC_OPS(X)
#undef X
        OPS
};

#define X(name, kinds, schema) static void boxed_##name(StableIValue *, uint64_t, uint64_t);
KVC_OPS(X)
#undef X

static const kvc_op ops[OPS] = {
#define X(name, kinds, schema) {#name, #name schema, kinds, boxed_##name, kvc_op_##name},
    KVC_OPS(X)
#undef X
};

#define X(name, kinds, schema)                                                                                         \
    static void boxed_##name(StableIValue *stack, uint64_t n_in, uint64_t n_out)                                       \
    {                                                                                                                  \
        (void)n_in, (void)n_out;                                                                                       \
        kvc_op_run(&ops[OP_##name], stack);                                                                            \
    }
KVC_OPS(X)
#undef X

static atomic_llong handles;
static int32_t torch_types[KVC_T_OTHER]; /* torch's code for each kvc_scalar */
static const char *const type_names[] = {"float32", "float16", "bfloat16", "uint8",
                                         "int32",   "int64",   "bool",     "another dtype"};

int64_t kvc_ops_handles(void) { return atomic_load(&handles); }

static void run_parallel(int64_t n, void (*body)(int64_t, int64_t, void *), void *context)
{
    kvc_torch.torch_parallel_for(0, n, 1, body, context);
}

const kvc_exec kvc_op_exec = {run_parallel};

const char *kvc_ops_bind(const char *path)
{
    static TorchLibraryHandle definitions, implementations, on_gpu; /* must outlive all calls, so never freed */
    static const char *outcome;
    if (definitions) return outcome; /* a namespace can be defined only once, even after a failure */
    const char *missing = kvc_shim_bind(path);
    if (missing) return missing;
    const int32_t types[KVC_T_OTHER] = {kvc_torch.aoti_torch_dtype_float32(),  kvc_torch.aoti_torch_dtype_float16(),
                                        kvc_torch.aoti_torch_dtype_bfloat16(), kvc_torch.aoti_torch_dtype_uint8(),
                                        kvc_torch.aoti_torch_dtype_int32(),    kvc_torch.aoti_torch_dtype_int64(),
                                        kvc_torch.aoti_torch_dtype_bool()};
    memcpy(torch_types, types, sizeof types);
    int failed = kvc_torch.aoti_torch_library_init_def("kvcompress", __FILE__, __LINE__, &definitions);
    if (!failed)
        failed = kvc_torch.aoti_torch_library_init_impl("kvcompress", "CPU", __FILE__, __LINE__, &implementations);
    if (!failed) failed = kvc_torch.aoti_torch_library_init_impl("kvcompress", "CUDA", __FILE__, __LINE__, &on_gpu);
    const uint64_t built_for = (uint64_t)2 << 56 | (uint64_t)10 << 48; /* torch 2.10 */
    for (int i = 0; i < OPS && !failed; i++) {
        failed = kvc_torch.aoti_torch_library_def(definitions, ops[i].schema);
        if (!failed) failed = kvc_torch.torch_library_impl(implementations, ops[i].name, ops[i].boxed, built_for);
        if (!failed) failed = kvc_torch.torch_library_impl(on_gpu, ops[i].name, ops[i].boxed, built_for);
    }
    outcome = failed ? "torch: registering the kvcompress ops failed" : NULL;
    return outcome;
}

/* ---------------------------------------------------------------- running an op */

static kvc_tensor describe(AtenTensorHandle handle, int32_t *device, int32_t *index)
{
    kvc_tensor t = {.type = KVC_T_OTHER, .numel = 1};
    int32_t type = 0;
    int64_t *size = NULL, *stride = NULL;
    kvc_torch.aoti_torch_get_dim(handle, &t.dim);
    kvc_torch.aoti_torch_get_sizes(handle, &size);
    kvc_torch.aoti_torch_get_strides(handle, &stride);
    kvc_torch.aoti_torch_get_dtype(handle, &type);
    kvc_torch.aoti_torch_get_device_type(handle, device);
    kvc_torch.aoti_torch_get_device_index(handle, index);
    kvc_torch.aoti_torch_get_data_ptr(handle, &t.data);
    for (int i = 0; i < KVC_T_OTHER; i++)
        if (torch_types[i] == type) t.type = (kvc_scalar)i;
    for (int64_t i = 0; i < t.dim; i++) t.numel *= size[i];
    t.size = size;
    t.stride = stride;
    return t;
}

void kvc_op_delete(AtenTensorHandle handle)
{
    kvc_torch.aoti_torch_delete_tensor_object(handle);
    atomic_fetch_sub(&handles, 1);
}

static void raise(const char *op, kvc_status status)
{
    char text[640];
    const char *type = status == KVC_E_TYPE ? "TypeError" : status == KVC_E_MEMORY ? "MemoryError" : "ValueError";
    snprintf(text, sizeof text, "kvcompress.%s: %s", type, kvc_error());
    kvc_torch.aoti_torch_check(false, op, __FILE__, __LINE__, text); /* throws */
}

static int64_t bytes_of(kvc_scalar type)
{
    return type == KVC_T_I64 || type == KVC_T_OTHER ? 8
           : type == KVC_T_F32 || type == KVC_T_I32 ? 4
           : type == KVC_T_U8 || type == KVC_T_BOOL ? 1
                                                    : 2;
}

/* First and last byte of a tensor. With strides, bytes in between may belong to other tensors. */
static void span_of(const kvc_tensor *t, uintptr_t *first, uintptr_t *last)
{
    int64_t elements = 1;
    for (int64_t d = 0; d < t->dim; d++) elements += (t->size[d] - 1) * t->stride[d];
    *first = (uintptr_t)t->data;
    *last = *first + (uintptr_t)(elements * bytes_of(t->type)) - 1;
}

static bool is_tensor(char kind) { return kind == 'T' || kind == 'W' || kind == 'B'; }

/* Checks that arguments that the op writes (kinds W and B) do not overlap other arguments. Two of kind B may overlap:
 * they can be blocks of one pool, as engines allocate them. */
static kvc_status check_apart(const kvc_frame *f)
{
    const char *kinds = f->op->kinds;
    uintptr_t first, last, begin, end;
    for (int w = 0; kinds[w]; w++) {
        if ((kinds[w] != 'W' && kinds[w] != 'B') || !f->tensor[w].numel) continue;
        span_of(&f->tensor[w], &first, &last);
        for (int i = 0; kinds[i]; i++) {
            bool skip = (i <= w || (kinds[i] == 'B' && kinds[w] == 'B')) && kinds[i] != 'T';
            if (skip || !is_tensor(kinds[i]) || !f->tensor[i].numel) continue;
            span_of(&f->tensor[i], &begin, &end);
            KVC_CHECK(
                end < first || begin > last, KVC_E_VALUE,
                "%s: expected argument %d apart from argument %d, which is written, got a tensor that shares memory "
                "with it; call .clone()",
                f->op->name, i + 1, w + 1);
        }
    }
    return KVC_OK;
}

void kvc_op_run(const kvc_op *op, StableIValue *stack)
{
    kvc_frame frame = {.op = op, .device = kvc_torch.aoti_torch_device_type_cpu()};
    kvc_status status = KVC_OK;
    int n = (int)strlen(op->kinds);
    AtenTensorHandle in[KVC_OP_ARGS] = {0};
    for (int i = 0; i < n; i++) {
        int32_t device = frame.device, index = frame.index;
        if (is_tensor(op->kinds[i])) {
            in[i] = (AtenTensorHandle)(uintptr_t)stack[i];
            atomic_fetch_add(&handles, 1);
            frame.tensor[i] = describe(in[i], &device, &index);
            if (i == 0 && device == kvc_torch.aoti_torch_device_type_cuda()) {
                frame.cuda = true;
                frame.device = device;
                frame.index = index;
            }
        } else if (op->kinds[i] == 'f') {
            memcpy(&frame.real[i], &stack[i], sizeof frame.real[i]);
        } else {
            frame.integer[i] = (int64_t)stack[i];
        }
        bool here = device == frame.device && (!frame.cuda || index == frame.index);
        if (!here && status == KVC_OK)
            status = kvc_fail(
                KVC_E_VALUE, "%s: expected all tensors on the %s, got argument %d elsewhere; move it with %s", op->name,
                frame.cuda ? "GPU of the first" : "CPU", i + 1, frame.cuda ? ".to(device)" : ".cpu()");
    }
    if (status == KVC_OK) status = check_apart(&frame);
    if (status == KVC_OK) status = op->run(&frame);
    for (int i = 0; i < n; i++)
        if (in[i]) kvc_op_delete(in[i]);
    for (int i = 0; i < frame.n_out; i++) {
        if (status != KVC_OK) {
            kvc_op_delete(frame.out[i]);
        } else {
            stack[i] = (StableIValue)(uintptr_t)frame.out[i];
            atomic_fetch_sub(&handles, 1); /* torch owns it from here on */
        }
    }
    if (status != KVC_OK) raise(op->name, status);
}

kvc_status kvc_op_new(kvc_frame *frame, kvc_scalar type, int64_t dim, const int64_t *size, AtenTensorHandle *out)
{
    int64_t stride[8], step = 1;
    for (int64_t i = dim - 1; i >= 0; i--) {
        stride[i] = step;
        step *= size[i] > 0 ? size[i] : 1;
    }
    KVC_CHECK(
        !kvc_torch.aoti_torch_empty_strided(dim, size, stride, torch_types[type], frame->device, frame->index, out),
        KVC_E_MEMORY, "out of memory: %s has no memory for its output", frame->op->name);
    atomic_fetch_add(&handles, 1);
    return KVC_OK;
}

kvc_status kvc_op_output(kvc_frame *frame, kvc_scalar type, int64_t dim, const int64_t *size, void **data)
{
    AtenTensorHandle out = NULL;
    KVC_TRY(kvc_op_new(frame, type, dim, size, &out));
    frame->out[frame->n_out++] = out;
    kvc_torch.aoti_torch_get_data_ptr(out, data);
    return KVC_OK;
}

/* Writes the names of the types in a bit set: "float32, float16". */
static const char *types_in(unsigned types, char wanted[96])
{
    *wanted = 0;
    for (int k = 0; k < KVC_T_OTHER; k++)
        if (types >> k & 1)
            snprintf(wanted + strlen(wanted), 96 - strlen(wanted), "%s%s", *wanted ? ", " : "", type_names[k]);
    return wanted;
}

kvc_status kvc_op_expect(const kvc_frame *frame, int i, const char *name, unsigned types, int64_t dim)
{
    const kvc_tensor *t = &frame->tensor[i];
    char wanted[96];
    KVC_CHECK(types >> t->type & 1, KVC_E_TYPE, "%s: %s: expected %s, got %s", frame->op->name, name,
              types_in(types, wanted), type_names[t->type]);
    KVC_CHECK(dim < 0 || t->dim == dim, KVC_E_VALUE, "%s: %s: expected %lld dimensions, got %lld", frame->op->name,
              name, (long long)dim, (long long)t->dim);
    return KVC_OK;
}

kvc_status kvc_op_on_cpu(const kvc_frame *f)
{
    KVC_CHECK(!f->cuda, KVC_E_VALUE, "%s: expected tensors on the CPU, got some on a GPU; move them with .cpu()",
              f->op->name);
    return KVC_OK;
}

kvc_status kvc_op_expect_contiguous(const kvc_frame *frame, int i, const char *name, unsigned types, int64_t dim)
{
    const kvc_tensor *t = &frame->tensor[i];
    int64_t step = 1;
    KVC_TRY(kvc_op_expect(frame, i, name, types, dim));
    for (int64_t d = t->dim - 1; d >= 0 && t->numel > 0; step *= t->size[d--])
        KVC_CHECK(t->size[d] == 1 || t->stride[d] == step, KVC_E_VALUE,
                  "%s: %s: expected a contiguous tensor, got stride %lld in dimension %lld; call .contiguous()",
                  frame->op->name, name, (long long)t->stride[d], (long long)d);
    return KVC_OK;
}

kvc_status kvc_op_dense(const kvc_frame *frame, int i, const char *name, kvc_dense *dense)
{
    const kvc_tensor *t = &frame->tensor[i];
    KVC_TRY(kvc_op_expect(frame, i, name, KVC_T_FLOATS, 4));
    KVC_CHECK(t->numel == 0 || t->size[3] == 1 || t->stride[3] == 1, KVC_E_VALUE,
              "%s: %s: expected a last dimension with stride 1, got stride %lld; call .contiguous()", frame->op->name,
              name, (long long)t->stride[3]);
    *dense = (kvc_dense){t->data, {t->stride[0], t->stride[1], t->stride[2]}, (kvc_dtype)t->type};
    return KVC_OK;
}
