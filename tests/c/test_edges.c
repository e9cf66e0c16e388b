#include "play.h"
void test_edges(void) {}
