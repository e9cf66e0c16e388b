/* wide.cu - the kernels over rows, instantiated again for heads of up to KVC_MAX_DIM dims, under names of their own. */
#define KVC_ROW_DIM KVC_MAX_DIM

#define kvc_write_kernel kvc_write_wide
#define kvc_pack_kernel kvc_pack_rows_wide
#define kvc_quantize_kernel kvc_quantize_rows_wide
#define kvc_dequantize_kernel kvc_dequantize_rows_wide
#define kvc_clear_kernel kvc_clear_wide
#define kvc_read_kernel kvc_read_rows_wide
#define kvc_anew_kernel kvc_anew_wide
#define kvc_move_kernel kvc_move_wide
#define kvc_score_kernel kvc_score_wide
#define kvc_store_kernel kvc_store_wide
#define kvc_write_launch kvc_write_launch_wide
#define kvc_cuda_pack kvc_pack_wide
#define kvc_cuda_quantize kvc_quantize_wide
#define kvc_cuda_dequantize kvc_dequantize_wide
#define kvc_cuda_read kvc_read_wide
#define kvc_cuda_compact kvc_compact_wide
#define kvc_cuda_score_tokens kvc_score_tokens_wide
#define kvc_cuda_store_tokens kvc_store_tokens_wide

#include "move.cu"
#include "read.cu"
#include "score.cu"
#include "write.cu"
