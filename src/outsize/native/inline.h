/* For functions whose arguments are constants where they are called. */
#ifndef OUTSIZE_INLINE_H
#define OUTSIZE_INLINE_H

#define ALWAYS_INLINE inline __attribute__((always_inline))

#endif
