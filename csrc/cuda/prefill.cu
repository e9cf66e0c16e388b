/* prefill.cu - attention of many query rows, for heads of 64 and 128 dims. */
#include "prefill.cuh"

KVC_KERNEL(kvc_prefill_64, kvc_call, 2 * KVC_PREFILL_ROWS, 1) { kvc_prefill_block(&a, 64); }
KVC_KERNEL(kvc_prefill_128, kvc_call, 2 * KVC_PREFILL_ROWS, 1) { kvc_prefill_block(&a, 128); }
