static void NATIVE(encode_range)(const void *arguments, size_t begin, size_t end)
{
    const struct nf4 *nf4 = arguments;
    for (size_t start = begin; start < end; start += BLOCK) {
        float values[BLOCK] = {0};
        uint8_t nearest[BLOCK];
        size_t count = end - start < BLOCK ? end - start : BLOCK;
        const uint16_t *halves = (const uint16_t *)nf4->elements + start;
        if (nf4->is_bf16 && count == BLOCK)
            for (int i = 0; i < BLOCK; i++)
                values[i] = from_bits((uint32_t)halves[i] << 16);
        else if (nf4->is_bf16)
            for (size_t i = 0; i < count; i++)
                values[i] = from_bits((uint32_t)halves[i] << 16);
        else
            memcpy(values, (const float *)nf4->elements + start, 4 * count);
        int32_t magnitudes[BLOCK], greatest = 0; /* bits of magnitudes are in their order, infinity and NaN last */
        memcpy(magnitudes, values, sizeof values);
        for (int i = 0; i < BLOCK; i++) {
            int32_t magnitude = magnitudes[i] & INT32_MAX;
            greatest = magnitude > greatest ? magnitude : greatest;
        }
        float largest = from_bits(greatest > 0x7F800000 ? 0x7FC00000 : (uint32_t)greatest);
        float by = largest < LEAST ? LEAST : largest;
        for (int i = 0; i < BLOCK; i++)
            values[i] = values[i] / by;
        for (int i = 0; i < BLOCK; i++) {
            int32_t below = 0;
            for (int k = 0; k < LEVELS - 1; k++)
                below += values[i] > nf4->borders[k];
            nearest[i] = (uint8_t)below;
        }
        for (int i = 0; i < BLOCK / 2; i++)
            nf4->codes[start / 2 + i] = (uint8_t)(nearest[2 * i] | nearest[2 * i + 1] << 4);
        nf4->scales[start / BLOCK] = greatest >= 0x7F800000 ? from_bits(0x7FC00000) : largest;
    }
}

static void NATIVE(decode_range)(const void *arguments, size_t begin, size_t end)
{
    const struct nf4 *nf4 = arguments;
    for (size_t start = begin; start < end; start += BLOCK) {
        const uint8_t *codes = nf4->codes + start / 2;
        float scale = nf4->scales[start / BLOCK], scaled[LEVELS], values[BLOCK];
        uint16_t halves[LEVELS], words[BLOCK];
        size_t count = end - start < BLOCK ? end - start : BLOCK;
        for (int k = 0; k < LEVELS; k++)
            scaled[k] = nf4->levels[k] * scale;
        if (nf4->is_bf16) {
            uint16_t *into = count < BLOCK ? words : (uint16_t *)nf4->elements + start;
            for (int k = 0; k < LEVELS; k++)
                halves[k] = nearest_bf16(scaled[k]);
            for (int i = 0; i < BLOCK / 2; i++) {
                into[2 * i] = halves[codes[i] & 15];
                into[2 * i + 1] = halves[codes[i] >> 4];
            }
            if (count < BLOCK)
                memcpy((uint16_t *)nf4->elements + start, words, 2 * count);
        } else {
            float *into = count < BLOCK ? values : (float *)nf4->elements + start;
            for (int i = 0; i < BLOCK / 2; i++) {
                into[2 * i] = scaled[codes[i] & 15];
                into[2 * i + 1] = scaled[codes[i] >> 4];
            }
            if (count < BLOCK)
                memcpy((float *)nf4->elements + start, values, 4 * count);
        }
    }
}
