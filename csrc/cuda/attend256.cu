/* attend256.cu - attention and mass for head dims up to 256. */
#include "mass.cuh"

KVC_ATTEND_KERNEL(256, 2)
KVC_MASS_KERNEL(256)
