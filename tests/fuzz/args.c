/* args.c - hostile arguments of the ops through the C API: entries, lengths, slots, geometry. Everything that the core
 * checks itself is arbitrary; the caller's arrays have their stated sizes. Calls are accepted or rejected, never out of
 * bounds. */
#include "input.h"

enum { B = 2, COLUMNS = 12, SLOTS = 64, T = 8, HEADS = 4, N = 1 << 15 };

static float numbers[4][N]; /* q, k, v, out; at most B * HEADS * T * 256 */

static int64_t entry(input *in, int64_t bytes)
{
    int key = (int)below(in, KVC_FORMATS + 1), value = below(in, 4) ? key : (int)below(in, KVC_FORMATS + 1);
    uint8_t how = byte(in);
    if (how == 0) return number(in);
    if (how == 1) return kvc_entry(bytes, key, value);
    return kvc_entry(how * 64 % bytes / 64 * 64, how & 2 ? KVC_RAW_F32 : key, how & 2 ? KVC_RAW_F32 : value);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, data + size};
    int64_t table[B * HEADS * COLUMNS], rows[B * HEADS * 2], seals[8], arena_bytes = 64 * (below(&in, 200) + 1) * 16;
    int32_t slots[B * HEADS * SLOTS];
    uint8_t real[B * T], *arena = aligned_alloc(64, (size_t)arena_bytes);
    static float lse[B * HEADS * T], accumulated[B * HEADS * 512], aux[HEADS];
    memset(arena, byte(&in), (size_t)arena_bytes);
    kvc_store s = {.arena = arena, .arena_bytes = arena_bytes, .table = table, .rows = rows};
    static const int64_t heads[] = {1, 2, 1, 2, 0, -1}, batches[] = {1, 2, 1, 2, 0, -1};
    s.batch = batches[below(&in, 6)], s.heads = heads[below(&in, 6)], s.table_heads = below(&in, 8) ? 1 : s.heads;
    if (below(&in, 16) == 0) s.table_heads = number(&in);
    s.columns = below(&in, COLUMNS + 1), s.key_dim = below(&in, 16) ? 16 * (1 + below(&in, 3)) : number(&in);
    s.value_dim = below(&in, 16) ? 16 * (1 + below(&in, 3)) : number(&in);
    s.page_size = below(&in, 16) ? 16 * (1 + below(&in, 2)) : number(&in),
    s.sinks = below(&in, 8) ? below(&in, 17) : number(&in);
    for (int64_t i = 0; i < B * HEADS; i++) {
        rows[2 * i] = below(&in, 8) ? below(&in, 60) : number(&in);
        rows[2 * i + 1] = below(&in, 8) ? 0 : number(&in);
    }
    if (below(&in, 2)) s.slots = slots, s.slot_capacity = below(&in, SLOTS + 1);
    for (int64_t i = 0; i < B * HEADS * SLOTS; i++)
        slots[i] = in.at < in.end && below(&in, 7) == 0 ? (int32_t)number(&in) : (int32_t)(i % SLOTS);
    for (int64_t i = 0; i < B * HEADS * COLUMNS; i++) table[i] = entry(&in, arena_bytes);
    for (int i = 0; i < 8; i++) seals[i] = below(&in, 2) ? table[below(&in, 8)] : entry(&in, arena_bytes);
    for (int i = 0; i < B * T; i++) real[i] = byte(&in) & 1;
    for (int i = 0; i < 4; i++)
        for (int64_t j = 0; j < N; j++) numbers[i][j] = (float)((i + 1) * j % 17 - 8) / 4;
    if (below(&in, 8) == 0) numbers[below(&in, 3)][number(&in) & (N - 1)] = real_number(&in);
    kvc_attend_args a = {
        .store = s, .T = below(&in, T + 1), .Tq = below(&in, T + 1), .lse = lse, .scale = real_number(&in)};
    a.query_heads = 1 + below(&in, HEADS), a.seals = seals, a.n_seals = below(&in, 5);
    a.seen = below(&in, 4) ? below(&in, 80) : number(&in), a.window = below(&in, 4) ? 0 : number(&in);
    a.softcap = below(&in, 4) ? 0 : real_number(&in);
    if (below(&in, 2)) a.real = real;
    if (below(&in, 2)) a.s_aux = aux;
    if (below(&in, 2)) a.accumulated = accumulated, a.accumulated_width = below(&in, 255);
    kvc_dtype dtype = (kvc_dtype)below(&in, 3);
    if (below(&in, 2)) dtype = KVC_F32;
    a.q = (kvc_dense){numbers[0], {HEADS * T * 256, T * 256, 256}, dtype};
    a.k = (kvc_dense){numbers[1], {HEADS * T * 256, T * 256, 256}, dtype};
    a.v = (kvc_dense){numbers[2], {HEADS * T * 256, T * 256, 256}, below(&in, 8) ? dtype : KVC_F16};
    a.out = (kvc_dense){numbers[3], {HEADS * T * 256, T * 256, 256}, (kvc_dtype)below(&in, 3)};
    int level = (int)below(&in, 5);
    while (!use_level(level)) level--;
    kvc_alloc_fail_at(below(&in, 8) ? 0 : 1 + below(&in, 6));
    kvc_status status = kvc_attend(&a);
    CHECK(status == KVC_OK || *kvc_error());
    kvc_move moves[4];
    for (int i = 0; i < 4; i++)
        moves[i] = (kvc_move){i,
                              entry(&in, arena_bytes),
                              below(&in, 20) - 1,
                              entry(&in, arena_bytes),
                              below(&in, 20),
                              below(&in, 8) ? s.page_size : 16};
    kvc_compact(&s, moves, below(&in, 5), NULL);
    static float dense[2][B * 2 * 64 * 256], scores[B * 2 * 64];
    kvc_dense k = {dense[0], {2 * 64 * 256, 64 * 256, 256}, KVC_F32},
              v = {dense[1], {2 * 64 * 256, 64 * 256, 256}, KVC_F32};
    kvc_read(&s, below(&in, 65), &k, &v, NULL);
    kvc_score_tokens(&s, (int)below(&in, 4), below(&in, 65), scores, NULL);
    kvc_alloc_fail_at(0);
    free(arena);
    return 0;
}
