/* cells.h - elements to and from their places in tiles; a page without numbers. */
#ifndef KVC_CELLS_H
#define KVC_CELLS_H

#include "codec.h"

/* n rows of cells, `stride` bytes apart, to tokens t0.. of a side; other tokens keep their bits. */
void kvc_put_cells(const kvc_room *side, int64_t t0, int64_t n, const uint8_t *cells, int64_t stride);
/* Token t of a tile. */
void kvc_get_cells(const kvc_side *side, const uint8_t *tile, int64_t t, uint8_t *cells);

#endif
