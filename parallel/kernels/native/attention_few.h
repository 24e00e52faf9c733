// A partition of attention with a few rows a head, by vectors: keys are transposed and values paired in registers, right where all
// rows of their head meet them, and what comes next is asked for. Included by attention.h.

#pragma once

#ifdef WEFT_HAS_PACKED_MATRIX

namespace weft {

constexpr int ASKED = 4;  // lines at a time: more hold up the loads after them

// Scores of NUM_ROWS rows with 16 tokens. A function of its own, as multiply_so_many_vectors is.
template <int NUM_ROWS>
__attribute__((noinline)) void score_few_rows(float* scores, int64_t scores_stride, const LeftVectors& q, const Number* keys,
                                              const int64_t* offsets, int num_steps, Upcoming& upcoming, int pace) {
    Totals<Multiplied, NUM_ROWS, 1> totals;
    const char* row = q.first;
    for (int step = 0; step < num_steps; step++, row += q.step_stride, keys += STEP) {
        Ints runs[TILE];
#pragma GCC unroll 16
        for (int i = 0; i < TILE; i++) runs[i] = load_bits(keys + offsets[i]);
        transpose(runs);
#pragma GCC unroll 16
        for (int run = 0; run < TILE; run++) {
            if (run % ASKED == 0) upcoming.ask<SOON>(pace * ASKED);
            const Ints line = to_line(runs[run]);
            totals.add(row + run * Multiplied::LEFT_BYTES, q.row_stride, reinterpret_cast<const char*>(&line), 0);
        }
    }
    totals.write(scores, scores_stride);
}

// Adds weight * value of 32 tokens to 32 dims of NUM_ROWS rows.
template <int NUM_ROWS>
__attribute__((noinline)) void weigh_few_rows(float* to, int64_t stride, const LeftVectors& weights, const Number* values,
                                              const int64_t* offsets, Upcoming& upcoming) {
    constexpr int WIDTH = NUM_ROWS > MOST_WHOLE_ROWS ? 1 : 2;
    for (int first = 0; first < PANEL / LANES; first += WIDTH) {
        Totals<Multiplied, NUM_ROWS, WIDTH> totals;
        totals.read(to + first * LANES, stride);
        for (int token = 0; token < PANEL; token += PER_LANE) {
            if (first == 0 && token % ASKED == 0) upcoming.ask<SOON>(ASKED);
            Ints lines[2];
            take_lines(lines, values + offsets[token], values + offsets[token + PER_LANE - 1]);
            const char* const row = weights.first + token / STEP * weights.step_stride + token % STEP / PER_LANE * Multiplied::LEFT_BYTES;
            totals.add(row, weights.row_stride, reinterpret_cast<const char*>(lines + first), sizeof(*lines));
        }
        totals.write(to + first * LANES, stride);
    }
}

// work(std::integral_constant of num_rows), which is at least 1.
template <int MOST = MOST_VECTOR_ROWS, class Work>
void with_number_of(int num_rows, const Work& work) {
    if (num_rows == MOST) return work(std::integral_constant<int, MOST>());
    if constexpr (MOST > 1) with_number_of<MOST - 1>(num_rows, work);
}

template <class C>
void PagedAttention<C>::attend_few_rows(const Tile& tile, Span seen, const Number* q, Scratch& scratch, Running* running, float* totals) {
    constexpr int STRIDE = PARTITION + LANES;
    const int head_dim = layout_.head_dim, heads = tile.num_kv_heads, rows = tile.num_queries * group_, num_rows = heads * rows;
    const int begin = first_of_run(seen.begin), num_tokens = (seen.end - begin + PANEL - 1) / PANEL * PANEL;
    int64_t offsets[PARTITION];
    find_tokens(tile, begin, seen, num_tokens, offsets);
    float* const scores = scratch.scores.room(size_t(num_rows) * STRIDE);
    float* const room = scratch.multiplied.room(room_to_multiply(num_rows, std::max(head_dim, num_tokens)));
    std::vector<LeftVectors>& parts = scratch.parts;
    const auto take_parts = [&](const Number* from, int64_t stride, int width) {
        parts.clear();
        for (int head = 0; head < num_rows; head += rows)
            for_each_part(rows, [&](int row, int count) {
                const LeftVectors part{reinterpret_cast<const char*>(from + (head + row) * stride), stride * int64_t(sizeof(*from)), 64, count};
                parts.push_back(to_multiply(part, width / STEP, room + room_to_multiply(head + row, width)));
            });
    };
    // work(number of rows, the part, its head, its first row), of all heads.
    const auto for_parts = [&](const auto& work) {
        const LeftVectors* part = parts.data();
        for (int head = 0; head < heads; head++)
            for_each_part(rows, [&](int row, int count) {
                with_number_of(count, [&](auto number) { work(number, *part, head, head * rows + row); });
                part++;
            });
    };

    Upcoming upcoming;
    const bool is_asked = scratch.asked == tensors_.keys + offsets[0];
    ask_ahead(upcoming, tile, seen, is_asked, scratch);
    take_parts(q, head_dim, head_dim);
    for (int token = 0; token < num_tokens; token += TILE) {
        const int pace = !is_asked && token < AHEAD ? 2 : 1;
        for_parts([&](auto number, const LeftVectors& part, int head, int row) {
            score_few_rows<number>(scores + row * STRIDE + token, STRIDE, part, tensors_.keys + head * head_dim, offsets + token,
                                   head_dim / STEP, upcoming, pace);
        });
    }
    soften(tile, 0, num_rows, {begin, seen.end}, scores, STRIDE, params_.scale, running);
    for (int row = 0; row < num_rows; row++) store_numbers(scores + row * STRIDE, num_tokens);
    take_parts(reinterpret_cast<const Number*>(scores), STRIDE * PER_LANE, num_tokens);
    std::fill_n(totals, size_t(num_rows) * head_dim, 0.0f);
    for (int token = 0; token < num_tokens; token += PANEL)
        for_parts([&](auto number, LeftVectors part, int head, int row) {
            part.first += token / STEP * part.step_stride;
            for (int dim = 0; dim < head_dim; dim += PANEL)
                weigh_few_rows<number>(totals + size_t(row) * head_dim + dim, head_dim, part, tensors_.values + head * head_dim + dim,
                                       offsets + token, upcoming);
        });
}

}  // namespace weft

#endif
