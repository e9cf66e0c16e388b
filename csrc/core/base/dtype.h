/* dtype.h - element types that callers name. */
#ifndef KVC_DTYPE_H
#define KVC_DTYPE_H

#include "base/status.h"

/* KVC_E_TYPE, said of `what`, for a number that is no dtype (another library's enum). */
kvc_status kvc_dtype_check(kvc_dtype dtype, const char *what);

#endif
