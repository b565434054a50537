/* Aligned memory that fits again where it has lain.
 *
 * Torch takes the memory of tensors on a CPU with posix_memalign(64). glibc cuts that out of a piece that is larger by the
 * alignment and more, and gives the rest back, so what a tensor leaves between two others is too small for the next one
 * of the very same size (https://sourceware.org/bugzilla/show_bug.cgi?id=14581): a heap of activations grew to 1.4 times
 * what was alive in it (docs/log.md). Pieces of whole multiples of 64 bytes keep their neighbours aligned, and plain
 * malloc takes one as it was left. So that is tried first, for what libc10.so asks for; free() takes either. */
#define _GNU_SOURCE
#include "level.h"

#include <stddef.h>

#if defined(__linux__) && defined(__LP64__) && (defined(__x86_64__) || defined(__aarch64__))

#include <errno.h>
#include <link.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ALIGNMENT = 64, HEADER_BYTES = 8, LEAST_BYTES = 1 << 16 };

/* From here on malloc makes mappings, which lie elsewhere. */
static atomic_size_t most_bytes;

static int aligned(void **memory, size_t alignment, size_t num_bytes)
{
    if (alignment != ALIGNMENT || num_bytes < LEAST_BYTES || num_bytes >= atomic_load(&most_bytes))
        return posix_memalign(memory, alignment, num_bytes);
    size_t whole = (num_bytes + HEADER_BYTES + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT - HEADER_BYTES;
    void *found = malloc(whole);
    if (!found)
        return ENOMEM;
    if ((uintptr_t)found % ALIGNMENT) {
        free(found);
        return posix_memalign(memory, alignment, whole);
    }
    *memory = found;
    return 0;
}

struct table {
    const ElfW(Rela) *entries;
    size_t num_entries;
};

/* Addresses in a dynamic section are those of the file until the loader has changed them; not every one does. */
static const void *loaded(const struct dl_phdr_info *library, ElfW(Addr) address)
{
    return (const void *)(address < library->dlpi_addr ? library->dlpi_addr + address : address);
}

static int redirect(const struct dl_phdr_info *library, ElfW(Addr) offset)
{
    uintptr_t place = library->dlpi_addr + offset, page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = place & -page;
    int read_only = 0;
    for (int at = 0; at < library->dlpi_phnum; at++) {
        const ElfW(Phdr) *part = &library->dlpi_phdr[at];
        /* The loader makes whole pages read-only: the one in which the part ends stays as it is. */
        uintptr_t end = (library->dlpi_addr + part->p_vaddr + part->p_memsz) & -page;
        read_only |= part->p_type == PT_GNU_RELRO && offset - part->p_vaddr < part->p_memsz && begin < end;
    }
    if (read_only && mprotect((void *)begin, page, PROT_READ | PROT_WRITE))
        return 0;
    atomic_store((_Atomic uintptr_t *)place, (uintptr_t)aligned);
    if (read_only)
        mprotect((void *)begin, page, PROT_READ);
    return 1;
}

static int redirect_all(struct dl_phdr_info *library, size_t size, void *count)
{
    (void)size;
    const char *name = strrchr(library->dlpi_name, '/');
    if (!name || strcmp(name, "/libc10.so"))
        return 0;
    const ElfW(Dyn) *dynamic = NULL;
    for (int at = 0; at < library->dlpi_phnum; at++)
        if (library->dlpi_phdr[at].p_type == PT_DYNAMIC)
            dynamic = (const void *)(library->dlpi_addr + library->dlpi_phdr[at].p_vaddr);
    struct table calls = {0}, data = {0};
    const ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++) {
        const void *address = loaded(library, dynamic->d_un.d_ptr);
        switch (dynamic->d_tag) {
        case DT_JMPREL: calls.entries = address; break;
        case DT_PLTRELSZ: calls.num_entries = dynamic->d_un.d_val / sizeof *calls.entries; break;
        case DT_RELA: data.entries = address; break;
        case DT_RELASZ: data.num_entries = dynamic->d_un.d_val / sizeof *data.entries; break;
        case DT_SYMTAB: symbols = address; break;
        case DT_STRTAB: names = address; break;
        default: break;
        }
    }
    if (!symbols || !names)
        return 0;
    const struct table tables[] = {calls, data};
    for (int which = 0; which < 2; which++)
        for (size_t at = 0; tables[which].entries && at < tables[which].num_entries; at++) {
            const ElfW(Rela) *entry = &tables[which].entries[at];
            size_t symbol = ELF64_R_SYM(entry->r_info);
            if (symbol && !strcmp(names + symbols[symbol].st_name, "posix_memalign"))
                *(int *)count += redirect(library, entry->r_offset);
        }
    return 0;
}

/* From now on have tensors of less than `num_bytes`, where malloc begins to make mappings, fit again where they have lain.
 * Returns the number of places where torch calls posix_memalign that were redirected; none on other systems. */
EXPORTED int outsize_align_tensors(size_t num_bytes)
{
    int count = 0;
    atomic_store(&most_bytes, num_bytes);
    dl_iterate_phdr(redirect_all, &count);
    return count;
}

#else

EXPORTED int outsize_align_tensors(size_t num_bytes)
{
    (void)num_bytes;
    return 0;
}

#endif
