/* A heap for tensors, in which nothing else lies.
 *
 * Torch takes the memory of tensors on a CPU with posix_memalign(64). glibc cuts that out of a piece that is larger by the
 * alignment and more, and gives the rest back, so what a tensor leaves between two others is too small for the next one
 * of the very same size (https://sourceware.org/bugzilla/show_bug.cgi?id=14581); and small pieces, some of them kept by each
 * thread for itself, come to lie between tensors and keep holes apart. How far such a heap grew was chance (docs/log.md).
 *
 * So what libc10.so takes of 64 KiB and more comes from here: one range of addresses, in which each tensor lies where it
 * first fits, lowest address first, behind a header that tells its size. Free parts, the holes, are known by a table
 * sorted by address, not by what is written into them, so that their pages can be handed back to the kernel. */
#define _GNU_SOURCE
#include "level.h"

#include <stddef.h>

#if defined(__linux__) && defined(__LP64__) && (defined(__x86_64__) || defined(__aarch64__))

#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

enum { ALIGNMENT = 64, HEADER_BYTES = ALIGNMENT, LEAST_BYTES = 1 << 16, FIRST_HOLES = 1 << 10, STRIDE_BYTES = 1 << 26 };

/* What lies before a tensor. */
struct header {
    size_t num_bytes; /* its own included */
    size_t mark;      /* of a tensor that is alive; what is freed twice has none */
};
static const size_t MARK = 0x6f757473697a6521;

/* A free part of the range, by offsets from its start. Two of them never touch. */
struct hole {
    size_t begin, end;
};

static struct {
    pthread_mutex_t lock;
    unsigned char *start; /* NULL until there is a range */
    size_t num_bytes;
    size_t usable;  /* what lies behind this has an address and no memory: it counts to nobody's limit */
    size_t touched; /* what lies behind this was never used, or has been handed back */
    struct hole *holes;
    size_t num_holes, room;
} heap = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* From here on tensors are mappings of their own, as malloc makes them. */
static atomic_size_t most_bytes;

static void lock_heap(void) { pthread_mutex_lock(&heap.lock); }
static void unlock_heap(void) { pthread_mutex_unlock(&heap.lock); }

/* Reserve addresses for as many bytes as the machine has, unless addresses are what is short (ulimit -v). */
static void reserve(void)
{
    struct rlimit limit;
    lock_heap();
    if (!heap.start && !getrlimit(RLIMIT_AS, &limit) && limit.rlim_cur == RLIM_INFINITY) {
        size_t page = (size_t)sysconf(_SC_PAGESIZE), num_bytes = (size_t)sysconf(_SC_PHYS_PAGES) * page;
        struct hole *holes = malloc(FIRST_HOLES * sizeof *holes);
        void *found = mmap(NULL, num_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (holes && found != MAP_FAILED && !pthread_atfork(lock_heap, unlock_heap, unlock_heap)) {
            holes[0] = (struct hole){0, num_bytes};
            heap.holes = holes, heap.num_holes = 1, heap.room = FIRST_HOLES;
            heap.num_bytes = num_bytes, heap.start = found;
        } else { /* then all is as it was */
            free(holes);
            if (found != MAP_FAILED)
                munmap(found, num_bytes);
        }
    }
    unlock_heap();
}

/* Have memory up to `end`; returns whether there is. */
static int reach(size_t end)
{
    if (end <= heap.usable)
        return 1;
    size_t wanted = (end + STRIDE_BYTES - 1) / STRIDE_BYTES * STRIDE_BYTES;
    if (wanted > heap.num_bytes)
        wanted = heap.num_bytes;
    if (mprotect(heap.start + heap.usable, wanted - heap.usable, PROT_READ | PROT_WRITE))
        return 0;
    heap.usable = wanted;
    return 1;
}

static void close_hole(size_t at)
{
    memmove(&heap.holes[at], &heap.holes[at + 1], (--heap.num_holes - at) * sizeof *heap.holes);
}

/* Make room for one hole more; returns whether there is. */
static int grow(void)
{
    if (heap.num_holes < heap.room)
        return 1;
    struct hole *more = realloc(heap.holes, 2 * heap.room * sizeof *more);
    if (!more)
        return 0;
    heap.holes = more, heap.room *= 2;
    return 1;
}

/* Return memory for a tensor; NULL where none is left, or no range. */
static void *take(size_t num_bytes)
{
    size_t whole = HEADER_BYTES + (num_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    unsigned char *found = NULL;
    lock_heap();
    for (size_t at = 0; at < heap.num_holes; at++) {
        struct hole *hole = &heap.holes[at];
        if (hole->end - hole->begin < whole)
            continue;
        if (!reach(hole->begin + whole))
            break;
        found = heap.start + hole->begin;
        hole->begin += whole;
        if (heap.touched < hole->begin)
            heap.touched = hole->begin;
        if (hole->begin == hole->end)
            close_hole(at);
        *(struct header *)found = (struct header){whole, MARK};
        break;
    }
    unlock_heap();
    return found ? found + HEADER_BYTES : NULL;
}

static void give_back(void *memory)
{
    lock_heap();
    struct header *header = (struct header *)((unsigned char *)memory - HEADER_BYTES);
    if (header->mark != MARK)
        abort(); /* as malloc does: freed twice, or written over */
    header->mark = 0;
    size_t begin = (size_t)((unsigned char *)header - heap.start), end = begin + header->num_bytes;
    size_t low = 0, high = heap.num_holes;
    while (low < high) { /* the first hole behind it */
        size_t middle = (low + high) / 2;
        if (heap.holes[middle].begin < begin)
            low = middle + 1;
        else
            high = middle;
    }
    int joins_before = low > 0 && heap.holes[low - 1].end == begin;
    int joins_behind = low < heap.num_holes && heap.holes[low].begin == end;
    if (joins_before && joins_behind) {
        heap.holes[low - 1].end = heap.holes[low].end;
        close_hole(low);
    } else if (joins_before)
        heap.holes[low - 1].end = end;
    else if (joins_behind)
        heap.holes[low].begin = begin;
    else if (grow()) { /* else the part is lost: there is no memory for 16 bytes */
        memmove(&heap.holes[low + 1], &heap.holes[low], (heap.num_holes++ - low) * sizeof *heap.holes);
        heap.holes[low] = (struct hole){begin, end};
    }
    unlock_heap();
}

static int aligned(void **memory, size_t alignment, size_t num_bytes)
{
    if (alignment == ALIGNMENT && num_bytes >= LEAST_BYTES && num_bytes < atomic_load(&most_bytes)) {
        void *found = take(num_bytes);
        if (found) {
            *memory = found;
            return 0;
        }
    }
    return posix_memalign(memory, alignment, num_bytes);
}

static void released(void *memory)
{
    if (heap.start && (size_t)((unsigned char *)memory - heap.start) < heap.num_bytes)
        give_back(memory);
    else
        free(memory);
}

/* Calls of torch's that go elsewhere from now on. */
struct redirection {
    const char *name;
    uintptr_t target;
    int count;
};

struct table {
    const ElfW(Rela) *entries;
    size_t num_entries;
};

/* Addresses in a dynamic section are those of the file until the loader has changed them; not every one does. */
static const void *loaded(const struct dl_phdr_info *library, ElfW(Addr) address)
{
    return (const void *)(address < library->dlpi_addr ? library->dlpi_addr + address : address);
}

static int redirect(const struct dl_phdr_info *library, ElfW(Addr) offset, uintptr_t target)
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
    atomic_store((_Atomic uintptr_t *)place, target);
    if (read_only)
        mprotect((void *)begin, page, PROT_READ);
    return 1;
}

static int redirect_all(struct dl_phdr_info *library, size_t size, void *wanted)
{
    (void)size;
    struct redirection *call = wanted;
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
            if (symbol && !strcmp(names + symbols[symbol].st_name, call->name))
                call->count += redirect(library, entry->r_offset, call->target);
        }
    return 0;
}

/* From now on have tensors of 64 KiB and more, and of less than `num_bytes`, where malloc begins to make mappings, lie in a
 * heap of their own. Returns the number of places where torch takes memory that were redirected: none where it takes
 * memory otherwise, or on other systems; -1 where no range of addresses could be had. */
EXPORTED int outsize_use_tensor_heap(size_t num_bytes)
{
    struct redirection frees = {"free", (uintptr_t)released, 0}, takes = {"posix_memalign", (uintptr_t)aligned, 0};
    atomic_store(&most_bytes, num_bytes);
    reserve();
    if (!heap.start)
        return -1;
    dl_iterate_phdr(redirect_all, &frees);
    if (frees.count)
        dl_iterate_phdr(redirect_all, &takes);
    return takes.count;
}

/* Hand the pages of all holes back to the kernel; returns how many parts that were. */
EXPORTED int outsize_trim_tensor_heap(void)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    int count = 0;
    lock_heap();
    for (size_t at = 0; at < heap.num_holes; at++) {
        size_t begin = (heap.holes[at].begin + page - 1) & -page;
        size_t end = heap.holes[at].end < heap.touched ? heap.holes[at].end & -page : (heap.touched + page - 1) & -page;
        if (begin < end)
            count += !madvise(heap.start + begin, end - begin, MADV_DONTNEED);
    }
    if (heap.num_holes && heap.holes[heap.num_holes - 1].end == heap.num_bytes)
        heap.touched = heap.holes[heap.num_holes - 1].begin;
    unlock_heap();
    return count;
}

#else

EXPORTED int outsize_use_tensor_heap(size_t num_bytes)
{
    (void)num_bytes;
    return 0;
}

EXPORTED int outsize_trim_tensor_heap(void) { return 0; }

#endif
