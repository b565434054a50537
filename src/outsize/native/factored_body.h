static void NATIVE(column_norms)(const void *arguments, size_t begin, size_t end)
{
    const struct columns *c = arguments;
    float sums[COLUMNS] = {0.0f};
    size_t count = end - begin;
    for (size_t row = 0; row < c->num_rows; row++) {
        const float *restrict values = c->values + row * c->num_columns + begin;
        if (c->fused)
            for (size_t i = 0; i < count; i++)
                sums[i] = fmaf(values[i], values[i], sums[i]);
        else
            for (size_t i = 0; i < count; i++)
                sums[i] += values[i] * values[i];
    }
    for (size_t i = 0; i < count; i++)
        c->norms[begin + i] = sqrtf(sums[i]);
}

/* Rows begin to end. A NaN stays one, as in torch's clamp. */
static void NATIVE(divide_by_root)(const void *arguments, size_t begin, size_t end)
{
    const struct division *d = arguments;
    const float *restrict columns = d->columns;
    size_t count = d->num_columns;
    float mean = d->mean, least = d->least;
    for (size_t row = begin; row < end; row++) {
        float *restrict values = d->values + row * count;
        float factor = d->rows[row];
        for (size_t i = 0; i < count; i++) {
            float estimate = factor * columns[i] / mean;
            estimate = estimate < least ? least : estimate;
            values[i] *= 1.0f / sqrtf(estimate);
        }
    }
}
