/* What is behind the stand-in's addresses: nothing, or (FAKE_CUDA_BACKED) host memory that can be read and written where
 * something is mapped, and nowhere else. Handles are parts of one memory file, so that what is in them stays in them
 * wherever they are mapped. Included by libcuda.c. */
static int file = -1;
static size_t file_end;

static int backed(void) { return getenv("FAKE_CUDA_BACKED") != NULL; }

/* `size` new addresses at a page's start; with memory or without. */
static CUdeviceptr addresses(size_t size, int with_memory) {
    size_t whole = (size + 2 * PAGE - 1) / PAGE * PAGE;
    if (!backed()) {
        CUdeviceptr at = next_address;
        next_address += whole;
        return at;
    }
    int protection = with_memory ? PROT_READ | PROT_WRITE : PROT_NONE;
    void *at = mmap(NULL, whole + PAGE, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) abort();
    return ((CUdeviceptr)(uintptr_t)at + PAGE - 1) / PAGE * PAGE;
}

static inline void back(struct handle *handle) {
    if (!backed()) return;
    if (file < 0) file = memfd_create("fake_cuda_memory", MFD_CLOEXEC);
    handle->place = file_end;
    file_end += handle->size;
    if (file < 0 || ftruncate(file, (off_t)file_end)) abort();
}

static inline void show(CUdeviceptr at, const struct handle *handle) {
    if (!backed()) return;
    void *place = (void *)(uintptr_t)at;
    if (mmap(place, handle->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, (off_t)handle->place) != place) abort();
}

static inline void hide(CUdeviceptr at, size_t size) {
    if (!backed()) return;
    void *place = (void *)(uintptr_t)at;
    if (mmap(place, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) != place) abort();
}
