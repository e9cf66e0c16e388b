/* status.h - error reporting of the core: a status code, and a thread-local message. */
#ifndef KVC_STATUS_H
#define KVC_STATUS_H

#include "kvc.h"

/* Stores the message ("expected ..., got ...; hint") and returns `status`. */
kvc_status kvc_fail(kvc_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

#define KVC_TRY(call)                                                                                                  \
    do {                                                                                                               \
        kvc_status status_ = (call);                                                                                   \
        if (status_ != KVC_OK) return status_;                                                                         \
    } while (0)

#define KVC_CHECK(condition, status, ...)                                                                              \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            kvc_fail(status, __VA_ARGS__);                                                                             \
            return status;                                                                                             \
        }                                                                                                              \
    } while (0)

#endif
