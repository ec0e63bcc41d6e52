/* A server with threads and no training loop: generations are its requests.
 *
 *     cc server.c -o server $(pkg-config --cflags --libs strandline) -lpthread
 *     ./server          host memory; no GPU is needed
 *     ./server cuda     GPU 0
 *
 * A cache is bounded and no leak. The log of answers is not, and each answer in it keeps its block. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "strandline.h"

#define THREADS 4
#define REQUESTS 60 /* of each thread */
#define CACHED 8

static int device;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *cache[CACHED];
static void *answers[THREADS * REQUESTS];
static int served;

static void check(int code, const char *what) {
    char why[512];
    if (code >= 0) return;
    strandline_error(why, sizeof why);
    fprintf(stderr, "%s failed (%d): %s\n", what, code, why);
    exit(1);
}

static void *take(size_t size) {
    void *block = NULL;
    check(strandline_malloc(device, size, NULL, &block), "strandline_malloc");
    return block;
}

/* Replaces the oldest entry. */
static void fill_cache(int request) {
    void **entry = &cache[request % CACHED];
    check(strandline_free(*entry), "strandline_free");
    *entry = take((size_t)2 << 20);
}

/* The leak. */
static void log_answer(int request) { answers[request] = take((size_t)64 << 10); }

static void *serve(void *unused) {
    int i;
    (void)unused;
    for (i = 0; i < REQUESTS; i++) {
        void *work;
        check(strandline_request_begin(), "strandline_request_begin");
        work = take((size_t)1 << 20);
        pthread_mutex_lock(&lock);
        fill_cache(served);
        log_answer(served);
        served++;
        pthread_mutex_unlock(&lock);
        check(strandline_free(work), "strandline_free");
        check(strandline_request_end(), "strandline_request_end");
    }
    return NULL;
}

int main(int argc, char **argv) {
    pthread_t threads[THREADS];
    int i;
    device = argc > 1 && strcmp(argv[1], "cuda") == 0 ? 0 : STRANDLINE_HOST;
    check(strandline_open(device, "{\"quiet\": true}"), "strandline_open");
    for (i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, serve, NULL);
    for (i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    printf("%d requests\n", served);
    return 0;
}
