/* SPDX-License-Identifier: MIT */
/*
 * Compute threads. A job is a range cut into parts; `ticket` holds the job's
 * number in its upper half and the next unclaimed part in its lower one, so
 * that claiming a part is one compare-and-swap that fails once the job is
 * over. Nobody waits for a worker that has claimed nothing: one that the host
 * descheduled delays no job.
 */
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "machine.h"

/* About 50 us: longer than the serial stretches between a program's jobs,
 * short enough to give the core back to a guest CPU soon. */
#define WORKER_SPINS 2000
#define YIELD_SPINS 4000

typedef struct Worker {
    VtpuPool *pool;
    pthread_t thread;
    unsigned slot;
} Worker;

struct VtpuPool {
    _Alignas(64) _Atomic uint64_t ticket; /* job << 32 | next part */
    /* The job, valid for who holds a part of it. */
    _Atomic uint32_t total, grain, parts;
    _Atomic(VtpuPoolFn) fn;
    _Atomic(void *) arg;
    _Alignas(64) _Atomic uint32_t done;   /* parts finished */
    _Alignas(64) _Atomic uint32_t sleepers;
    _Atomic uint32_t wake;                /* futex word */
    _Atomic(const atomic_uint *) stop; /* NULL: nobody is about to use the pool */
    _Atomic bool exiting;
    unsigned workers;
    Worker worker[];
};

static void futex_wait(_Atomic uint32_t *word, uint32_t value)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake_all(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

static bool stopped(const VtpuPool *pool)
{
    return atomic_load_explicit(atomic_load_explicit(&pool->stop, memory_order_relaxed),
                                memory_order_relaxed);
}

/* Claims and computes parts until none is left; returns how many. */
static unsigned take_parts(VtpuPool *pool, unsigned slot)
{
    unsigned taken = 0;

    for (;;) {
        uint64_t ticket = atomic_load_explicit(&pool->ticket, memory_order_acquire);
        uint32_t part = (uint32_t)ticket;
        uint32_t parts = atomic_load_explicit(&pool->parts, memory_order_acquire);
        uint32_t total = atomic_load_explicit(&pool->total, memory_order_acquire);
        uint32_t grain = atomic_load_explicit(&pool->grain, memory_order_acquire);
        VtpuPoolFn fn = atomic_load_explicit(&pool->fn, memory_order_acquire);
        void *arg = atomic_load_explicit(&pool->arg, memory_order_acquire);
        if (part >= parts) {
            return taken;
        }
        /* Success means that the fields above belong to this job. */
        if (!atomic_compare_exchange_weak_explicit(&pool->ticket, &ticket, ticket + 1,
                                                   memory_order_acq_rel,
                                                   memory_order_relaxed)) {
            continue;
        }
        if (!stopped(pool)) {
            uint32_t begin = part * grain;
            fn(arg, begin, total - begin < grain ? total : begin + grain, slot);
        }
        atomic_fetch_add_explicit(&pool->done, 1, memory_order_release);
        taken++;
    }
}

static bool has_parts(const VtpuPool *pool)
{
    uint32_t part = (uint32_t)atomic_load_explicit(&pool->ticket, memory_order_seq_cst);
    return part < atomic_load_explicit(&pool->parts, memory_order_relaxed);
}

static void *worker_main(void *opaque)
{
    Worker *worker = opaque;
    VtpuPool *pool = worker->pool;
    unsigned spins = 0;

    while (!atomic_load_explicit(&pool->exiting, memory_order_acquire)) {
        if (take_parts(pool, worker->slot)) {
            spins = 0;
            continue;
        }
        if (spins++ < WORKER_SPINS &&
            atomic_load_explicit(&pool->stop, memory_order_relaxed)) {
            vtpu_relax();
            continue;
        }
        uint32_t seen = atomic_load(&pool->wake);
        atomic_fetch_add(&pool->sleepers, 1);
        /* A job published before the count was raised is seen here. */
        if (!has_parts(pool) && !atomic_load(&pool->exiting)) {
            futex_wait(&pool->wake, seen);
        }
        atomic_fetch_sub(&pool->sleepers, 1);
        spins = 0;
    }
    return NULL;
}

static void wake_sleepers(VtpuPool *pool)
{
    if (atomic_load(&pool->sleepers)) {
        atomic_fetch_add(&pool->wake, 1);
        futex_wake_all(&pool->wake);
    }
}

bool vtpu_pool_for(VtpuPool *pool, uint32_t total, uint32_t grain, VtpuPoolFn fn, void *arg)
{
    if (total == 0) {
        return true;
    }
    grain = grain ? grain : 1;
    uint32_t parts = total / grain + (total % grain != 0);
    if (parts == 1) {
        fn(arg, 0, total, 0);
        return true;
    }
    if (pool->workers == 0) {
        for (uint32_t begin = 0; begin < total;) {
            uint32_t end = total - begin < grain ? total : begin + grain;
            if (stopped(pool)) {
                return false;
            }
            fn(arg, begin, end, 0);
            begin = end;
        }
        return true;
    }
    uint64_t job = (atomic_load_explicit(&pool->ticket, memory_order_relaxed) >> 32) + 1;
    /* Close the old job under the new number before its fields change: a
     * worker that read some old and some new ones then fails its claim. */
    atomic_store_explicit(&pool->ticket, job << 32 | UINT32_MAX, memory_order_seq_cst);
    job++;
    atomic_store_explicit(&pool->parts, parts, memory_order_release);
    atomic_store_explicit(&pool->total, total, memory_order_release);
    atomic_store_explicit(&pool->grain, grain, memory_order_release);
    atomic_store_explicit(&pool->fn, fn, memory_order_release);
    atomic_store_explicit(&pool->arg, arg, memory_order_release);
    atomic_store_explicit(&pool->done, 0, memory_order_release);
    atomic_store_explicit(&pool->ticket, job << 32, memory_order_seq_cst);
    wake_sleepers(pool);
    take_parts(pool, 0);
    for (unsigned spins = 0;
         atomic_load_explicit(&pool->done, memory_order_acquire) != parts; spins++) {
        if (spins < YIELD_SPINS) {
            vtpu_relax();
        } else {
            sched_yield();
        }
    }
    return !stopped(pool);
}

void vtpu_pool_lend(VtpuPool *pool, const atomic_uint *stop)
{
    atomic_store_explicit(&pool->stop, stop, memory_order_relaxed);
}

VtpuPool *vtpu_pool_new(unsigned threads)
{
    size_t bytes = sizeof(VtpuPool) + threads * sizeof(Worker);
    VtpuPool *pool = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
    sigset_t all, old;

    if (!pool) {
        return NULL;
    }
    *pool = (VtpuPool) { .stop = NULL };
    /* Signals belong to the program around the machine. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    for (unsigned i = 0; i + 1 < threads; i++) {
        Worker *worker = &pool->worker[i];
        *worker = (Worker) { .pool = pool, .slot = i + 1 };
        if (pthread_create(&worker->thread, NULL, worker_main, worker)) {
            break;
        }
        pthread_setname_np(worker->thread, "vtpu-compute");
        pool->workers++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (pool->workers + 1 < threads) {
        vtpu_pool_free(pool);
        return NULL;
    }
    return pool;
}

void vtpu_pool_free(VtpuPool *pool)
{
    if (!pool) {
        return;
    }
    atomic_store(&pool->exiting, true);
    atomic_fetch_add(&pool->wake, 1);
    futex_wake_all(&pool->wake);
    for (unsigned i = 0; i < pool->workers; i++) {
        pthread_join(pool->worker[i].thread, NULL);
    }
    free(pool);
}
