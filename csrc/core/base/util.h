/* util.h - integer arithmetic. */
#ifndef KVC_UTIL_H
#define KVC_UTIL_H

#include <stdint.h>

static inline int64_t kvc_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t kvc_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t kvc_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

#endif
