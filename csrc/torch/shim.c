#include "shim.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

kvc_shim kvc_torch;

const char *kvc_shim_bind(const char *path)
{
    static char text[512];
    kvc_shim found;
    void *library = dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
    if (!library) {
        snprintf(text, sizeof text, "expected libtorch_cpu loaded from %s, it is not; import torch first", path);
        return text;
    }
#define FIND(result, name, arguments, since)                                                                           \
    {                                                                                                                  \
        void *at = dlsym(library, #name);                                                                              \
        if (!at) {                                                                                                     \
            snprintf(text, sizeof text,                                                                                \
                     "torch: expected the function " #name " (torch " since " or newer), this libtorch has none; "     \
                     "install torch>=2.10");                                                                           \
            dlclose(library);                                                                                          \
            return text;                                                                                               \
        }                                                                                                              \
        memcpy(&found.name, &at, sizeof at);                                                                           \
    }
    KVC_SHIM_FUNCTIONS(FIND)
#undef FIND
    kvc_torch = found; /* the library stays loaded because its handle is not closed */
    return NULL;
}
