#include "status.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char text[512];

const char *kvc_error(void) { return text; }

kvc_status kvc_fail(kvc_status status, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list); /* NOLINT: clang-tidy 14 overlooks va_start in C */
    va_end(list);
    return status;
}
