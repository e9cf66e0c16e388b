/* attend256.cu - attention and accumulated attention for head dims up to 256. */
#include "accumulated.cuh"

#define SET(name, per, kinds) KVC_ATTEND_KERNEL(name, kinds, 256, 2)
KVC_SETS(SET)
KVC_ACCUMULATE_KERNEL(any, (1u << KVC_KINDS) - 1, 256)
