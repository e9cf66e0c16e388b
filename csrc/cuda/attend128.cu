/* attend128.cu - attention and mass for head dims up to 128. */
#include "mass.cuh"

KVC_ATTEND_KERNEL(128, 3)
KVC_MASS_KERNEL(128)
