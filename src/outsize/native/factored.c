/* What takes longest of a step with second moments by row and column: norms of columns, and the division by the root of
 * the estimate. */
#include <math.h>
#include <stddef.h>

#include "threads.h"

/* Columns that a thread takes at once, 4 KiB of a row, whose sums stay in the first cache; and elements of rows. */
enum { COLUMNS = 1 << 10, CHUNK = 1 << 16 };

/* A matrix, row by row, and what is made of it. */
struct columns {
    const float *values;
    float *norms;
    size_t num_rows;
    size_t num_columns;
    int fused; /* whether a square is fused with the sum it enters */
};

struct division {
    float *values;
    const float *rows;
    const float *columns;
    size_t num_columns;
    float mean;
    float least;
};

#define BODY "factored_body.h"
#include "versions.h"

/* norms[0..num_columns) of values[0..num_rows * num_columns): roots of sums of squares, each in the order of its rows. */
EXPORTED void outsize_column_norms(
    const float *values, float *norms, size_t num_rows, size_t num_columns, int fused, int num_threads)
{
    struct columns columns = {values, norms, num_rows, num_columns, fused};
    outsize_parallel(CHOOSE(column_norms), &columns, num_columns, COLUMNS, num_threads);
}

/* values[i, j] times one over the root of rows[i] * columns[j] / mean, which is at least `least`. */
EXPORTED void outsize_divide_by_root(
    float *values, const float *rows, const float *columns, size_t num_rows, size_t num_columns, float mean,
    float least, int num_threads)
{
    struct division division = {values, rows, columns, num_columns, mean, least};
    size_t chunk = num_columns < CHUNK ? CHUNK / num_columns : 1;
    outsize_parallel(CHOOSE(divide_by_root), &division, num_rows, chunk, num_threads);
}
