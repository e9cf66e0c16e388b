/* attend64.cu - attention and mass for head dims up to 64. */
#include "mass.cuh"

KVC_ATTEND_KERNEL(64, 3)
KVC_MASS_KERNEL(64)
