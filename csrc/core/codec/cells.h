/* cells.h - moves elements to and from tiles, without interpreting them. */
#ifndef KVC_CELLS_H
#define KVC_CELLS_H

#include "codec.h"

/* Writes n rows of cells, `stride` bytes apart, as tokens [t0, t0 + n) of a side; other tokens are unchanged. */
void kvc_put_cells(const kvc_room *side, int64_t t0, int64_t n, const uint8_t *cells, int64_t stride);
/* Reads token t of a tile. */
void kvc_get_cells(const kvc_side *side, const uint8_t *tile, int64_t t, uint8_t *cells);

#endif
