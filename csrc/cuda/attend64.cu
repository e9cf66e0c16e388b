/* attend64.cu - attention and accumulated attention for head dims up to 64. */
#include "accumulated.cuh"

#define SET(name, per, kinds) KVC_ATTEND_KERNEL(name, kinds, 64, per)
KVC_SETS(SET)
KVC_ACCUMULATE_KERNEL(any, (1u << KVC_KINDS) - 1, 64)
