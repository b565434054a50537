/* into[i] = after + what the fields have of their rows less `before`. */
static ALWAYS_INLINE void NATIVE(gather)(
    const struct field *fields, int count, int64_t columns, uint16_t before, uint16_t after, uint16_t *into)
{
    int64_t i = 0;
    for (; i + LANES <= columns; i += LANES) {
        lanes word = {0};
        for (int f = 0; f < count; f++) {
            lanes part = (*(const lanes *)(fields[f].row + i) - before) & fields[f].mask;
            word |= (part << fields[f].left) >> fields[f].right;
        }
        *(lanes *)(into + i) = word + after;
    }
    for (; i < columns; i++) {
        uint16_t word = 0;
        for (int f = 0; f < count; f++) {
            uint16_t part = (uint16_t)(fields[f].row[i] - before) & fields[f].mask;
            word |= (uint16_t)((uint16_t)(part << fields[f].left) >> fields[f].right);
        }
        into[i] = (uint16_t)(word + after);
    }
}

/* The lowest exponent of the window that covers most of a sample; the first of several. */
static ALWAYS_INLINE int NATIVE(choose_base)(const struct layout *layout, const uint16_t *block, int64_t numel)
{
    int num_bins = 1 << (15 - layout->mantissa_bits), width = 1 << layout->code_bits;
    uint16_t seen[4][256] = {{0}}; /* by turns: most samples are in a few bins, and each waits for the one before */
    for (int64_t i = 0; i * SAMPLING < numel; i++)
        seen[i & 3][block[i * SAMPLING] >> layout->mantissa_bits & (num_bins - 1)]++;
    for (int bin = 0; bin < num_bins; bin++)
        seen[0][bin] = (uint16_t)(seen[0][bin] + seen[1][bin] + seen[2][bin] + seen[3][bin]);
    int covered = 0, best = 0, most = -1;
    for (int bin = 0; bin < width; bin++)
        covered += seen[0][bin];
    for (int base = 0; base + width <= num_bins; base++) {
        if (covered > most)
            best = base, most = covered;
        if (base + width < num_bins)
            covered += seen[0][base + width] - seen[0][base];
    }
    return best;
}

/* Fill the stored rows of a block: hosts without their holes, and in these the guests. */
static ALWAYS_INLINE void NATIVE(pack)(
    const struct layout *layout, const uint16_t *block, int64_t columns, uint16_t base, uint16_t *rows)
{
    int hosts = ROWS - layout->num_guests, keep = ~hole_of(layout) & 0xFFFF;
    for (int host = 0; host < hosts; host++) {
        struct field fields[1 + MOST_PIECES + MOST_SIGNS] = {field_of(block + host * columns, keep, 0)};
        int count = 1;
        for (int p = 0; p < layout->num_pieces; p++) {
            int guest = host - layout->first_host[p], shift = layout->shift[p];
            if (guest < 0 || guest >= layout->num_guests)
                continue;
            int moved = shift >= 0 ? layout->mask[p] << shift : layout->mask[p] >> -shift;
            fields[count++] = field_of(block + (hosts + guest) * columns, moved, -shift);
        }
        for (int guest = 0; host == hosts - 1 && guest < layout->num_signs; guest++)
            fields[count++] = field_of(block + (hosts + guest) * columns, 0x8000, layout->sign_bit[guest] - 15);
        NATIVE(gather)(fields, count, columns, base, 0, rows + host * columns);
    }
}

static ALWAYS_INLINE void NATIVE(unpack)(
    const struct layout *layout, const uint16_t *rows, int64_t columns, uint16_t base, uint16_t *block)
{
    int hosts = ROWS - layout->num_guests, keep = ~hole_of(layout) & 0xFFFF;
    for (int host = 0; host < hosts; host++) {
        struct field own = field_of(rows + host * columns, keep, 0);
        NATIVE(gather)(&own, 1, columns, 0, base, block + host * columns);
    }
    for (int guest = 0; guest < layout->num_guests; guest++) {
        struct field fields[MOST_PIECES + 1];
        int count = 0;
        for (int p = 0; p < layout->num_pieces; p++) {
            const uint16_t *row = rows + (layout->first_host[p] + guest) * columns;
            fields[count++] = field_of(row, layout->mask[p], layout->shift[p]);
        }
        if (layout->num_signs) {
            int bit = layout->sign_bit[guest];
            fields[count++] = field_of(rows + (hosts - 1) * columns, 1 << bit, 15 - bit);
        }
        NATIVE(gather)(fields, count, columns, 0, base, block + (hosts + guest) * columns);
    }
}

/* List elements of a span whose hole is not empty; returns how many, or -1 where there are more than `most`. */
static ALWAYS_INLINE int64_t NATIVE(list_exceptions)(
    const struct layout *layout, const uint16_t *span, int64_t numel, uint16_t base, int64_t most, uint16_t *listed)
{
    uint16_t hole = (uint16_t)hole_of(layout);
    int64_t count = 0;
    for (int64_t i = 0; i < numel; i += LANES) { /* a block is a multiple of 16 */
        uint64_t odd[LANES / 8];
        flags are_odd = __builtin_convertvector(((*(const lanes *)(span + i) - base) & hole) != 0, flags);
        memcpy(odd, &are_odd, LANES);
        for (int part = 0; part < LANES / 8; part++) {
            uint64_t left = odd[part] & 0x0101010101010101;
            if (!left)
                continue;
            if (count + __builtin_popcountll(left) > most)
                return -1;
            for (; left; left &= left - 1) {
                int64_t position = i + 8 * part + (__builtin_ctzll(left) >> 3);
                int rest = (uint16_t)(span[position] - base) & hole;
                listed[count++] = (uint16_t)(position | rest >> layout->hole_shift << POSITION_BITS);
            }
        }
    }
    return count;
}

/* Returns the bytes, or those of the source where encoded words take no fewer. */
static int64_t NATIVE(encode)(
    const struct layout *layout, const struct sections *at, const uint16_t *source, uint8_t *into)
{
    uint16_t *words = (uint16_t *)into;
    int64_t room = 2 * at->numel - at->num_bases; /* bases wait at the end until it is known where they go */
    int64_t most = room > 2 * at->exceptions_start ? (room - 1) / 2 - at->exceptions_start : -1, count = 0;
    int hosts = ROWS - layout->num_guests;
    for (int64_t b = 0; b < at->num_bases && most >= 0; b++) {
        const uint16_t *block = source + b * BLOCK;
        int64_t numel = length_of(at, b);
        int chosen = NATIVE(choose_base)(layout, block, numel);
        uint16_t base = (uint16_t)(chosen << layout->mantissa_bits);
        NATIVE(pack)(layout, block, numel / ROWS, base, words + b * (BLOCK / ROWS) * hosts);
        for (int64_t start = 0; start < numel; start += SPAN) {
            int64_t length = numel - start < SPAN ? numel - start : SPAN;
            uint16_t *listed = words + at->exceptions_start + count;
            int64_t found = NATIVE(list_exceptions)(layout, block + start, length, base, most - count, listed);
            if (found < 0)
                return 2 * at->numel;
            words[at->counts_start + (b * BLOCK + start) / SPAN] = (uint16_t)found;
            count += found;
        }
        into[room + b] = (uint8_t)chosen;
    }
    if (most < 0)
        return 2 * at->numel;
    memcpy(words + at->left_over_start, source + at->numel - at->left_over, (size_t)(2 * at->left_over));
    int64_t end = 2 * (at->exceptions_start + count);
    memmove(into + end, into + room, (size_t)at->num_bases);
    return end + at->num_bases;
}

static int NATIVE(decode)(
    const struct layout *layout, const struct sections *at, const uint8_t *encoded, int64_t num_exceptions,
    uint16_t *into)
{
    const uint16_t *words = (const uint16_t *)encoded, *counts = words + at->counts_start;
    const uint16_t *listed = words + at->exceptions_start;
    const uint8_t *bases = encoded + 2 * (at->exceptions_start + num_exceptions);
    int64_t counted = 0;
    int hosts = ROWS - layout->num_guests;
    for (int64_t span = 0; span < at->num_counts; span++)
        counted += counts[span];
    if (counted != num_exceptions)
        return -1;
    for (int64_t b = 0; b < at->num_bases; b++) {
        uint16_t *block = into + b * BLOCK;
        int64_t numel = length_of(at, b);
        uint16_t base = (uint16_t)(bases[b] << layout->mantissa_bits);
        NATIVE(unpack)(layout, words + b * (BLOCK / ROWS) * hosts, numel / ROWS, base, block);
        for (int64_t start = 0; start < numel; start += SPAN)
            for (int left = counts[(b * BLOCK + start) / SPAN]; left > 0; left--, listed++) {
                int64_t position = start + (*listed & (SPAN - 1));
                if (position >= numel)
                    return -1;
                block[position] = (uint16_t)(block[position] + (*listed >> POSITION_BITS << layout->hole_shift));
            }
    }
    memcpy(into + at->numel - at->left_over, words + at->left_over_start, (size_t)(2 * at->left_over));
    return 0;
}

static void NATIVE(halves)(
    const uint32_t *restrict source, int64_t count, uint16_t *restrict lower, uint16_t *restrict upper)
{
    for (int64_t i = 0; i < count; i++) {
        lower[i] = (uint16_t)source[i];
        upper[i] = (uint16_t)(source[i] >> 16);
    }
}

static void NATIVE(whole)(
    const uint16_t *restrict lower, const uint16_t *restrict upper, int64_t count, uint32_t *restrict into)
{
    for (int64_t i = 0; i < count; i++)
        into[i] = (uint32_t)upper[i] << 16 | lower[i];
}
