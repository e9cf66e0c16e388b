/* dtype.c - validates element types given by callers. */
#include "base/dtype.h"

kvc_status kvc_dtype_check(kvc_dtype dtype, const char *what)
{
    KVC_CHECK((int)dtype >= KVC_F32 && (int)dtype <= KVC_BF16, KVC_E_TYPE,
              "%s: expected a dtype, KVC_F32 (0), KVC_F16 (1) or KVC_BF16 (2), got %d", what, (int)dtype);
    return KVC_OK;
}
