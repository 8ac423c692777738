/* SPDX-License-Identifier: MIT */
#include "drm_userq.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define PAGE_BYTES 4096
#define SPINS 1000           /* looks at the fence word before sleeping: some microseconds */
#define NOTIFY_SLICE_NS 100000000ll /* after which a thread sees that the queue is closed */

struct rt_userq {
    int fd;
    uint32_t queue;
    uint64_t base;
    struct drm_vtpu_ring_entry *ring;
    size_t ring_bytes;
    uint32_t num_entries;
    const volatile uint64_t *fence;
    volatile uint32_t *doorbell;

    uint32_t tail;
    uint64_t submitted;
    uint32_t *ends; /* tail behind each of the last jobs, by point */
    uint32_t num_ends; /* more than may be in flight: the last that ended is among them */

    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t left;
    unsigned notifiers; /* threads */
    atomic_bool closing;
    atomic_bool failed; /* as a wait has found out */
};

static int call(int fd, unsigned long request, void *argument)
{
    while (ioctl(fd, request, argument) < 0)
        if (errno != EINTR && errno != EAGAIN)
            return errno;
    return 0;
}

static int64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

uint64_t rt_userq_completed(const struct rt_userq *userq)
{
    uint64_t word = *userq->fence;

    /* What the job wrote is seen after the word that says so. */
    atomic_thread_fence(memory_order_acquire);
    return word > userq->base ? word : userq->base;
}

int rt_userq_wait(struct rt_userq *userq, uint64_t point, int64_t deadline_ns)
{
    struct drm_vtpu_queue_wait wait = {
        .queue_id = userq->queue,
        .value = point,
        .timeout_ns = deadline_ns,
    };
    int error;

    for (int i = 0; i < SPINS; i++)
        if (rt_userq_completed(userq) >= point)
            return 0;
    error = call(userq->fd, DRM_IOCTL_VTPU_QUEUE_WAIT, &wait);
    if (error == EIO || error == ENODEV)
        atomic_store(&userq->failed, true);
    atomic_thread_fence(memory_order_acquire);
    return error;
}

/* Entries that the device may not have read yet. */
static uint32_t in_use(const struct rt_userq *userq)
{
    uint64_t completed = rt_userq_completed(userq);

    if (completed >= userq->submitted)
        return 0;
    if (completed == userq->base)
        return userq->tail;
    return userq->tail - userq->ends[completed % userq->num_ends];
}

int rt_userq_submit(struct rt_userq *userq, const struct drm_vtpu_cmd *commands, uint32_t count,
                    uint64_t point)
{
    if (atomic_load(&userq->failed))
        return EIO;
    while (userq->num_entries - in_use(userq) < count) {
        int error = rt_userq_wait(userq, rt_userq_completed(userq) + 1, INT64_MAX);

        if (error)
            return error;
    }
    for (uint32_t i = 0; i < count; i++) {
        struct drm_vtpu_ring_entry *entry = &userq->ring[userq->tail++ % userq->num_entries];
        bool last = i == count - 1;

        *entry = (struct drm_vtpu_ring_entry){
            .op = (uint8_t)commands[i].op,
            .flags = last ? DRM_VTPU_RING_FENCE | DRM_VTPU_RING_IRQ : 0,
            .cookie = commands[i].cookie,
            .fence = last ? point : 0,
        };
        memcpy(entry->payload, commands[i].payload, sizeof(entry->payload));
    }
    userq->ends[point % userq->num_ends] = userq->tail;
    userq->submitted = point;
    atomic_thread_fence(memory_order_release);
    *userq->doorbell = userq->tail;
    return 0;
}

/* ---- Events: the driver has none for single entries, so a thread waits for each ---- */

struct notifier {
    struct rt_userq *userq;
    uint64_t point;
    int eventfd;
};

static void leave(struct rt_userq *userq)
{
    pthread_mutex_lock(&userq->lock);
    userq->notifiers--;
    pthread_cond_signal(&userq->left);
    pthread_mutex_unlock(&userq->lock);
}

static void *notify_thread(void *opaque)
{
    struct notifier *notifier = opaque;
    uint64_t one = 1;
    int error;

    do {
        error = rt_userq_wait(notifier->userq, notifier->point, now_ns() + NOTIFY_SLICE_NS);
    } while (error == ETIMEDOUT && !atomic_load(&notifier->userq->closing));
    while (write(notifier->eventfd, &one, sizeof(one)) < 0 && errno == EINTR)
        ;
    close(notifier->eventfd);
    leave(notifier->userq);
    free(notifier);
    return NULL;
}

int rt_userq_notify(struct rt_userq *userq, uint64_t point, int eventfd)
{
    struct notifier *notifier = malloc(sizeof(*notifier));
    pthread_t thread;
    int error;

    if (!notifier)
        return ENOMEM;
    *notifier = (struct notifier){ userq, point, fcntl(eventfd, F_DUPFD_CLOEXEC, 0) };
    if (notifier->eventfd < 0) {
        error = errno;
        free(notifier);
        return error;
    }
    pthread_mutex_lock(&userq->lock);
    userq->notifiers++;
    pthread_mutex_unlock(&userq->lock);
    error = pthread_create(&thread, NULL, notify_thread, notifier);
    if (error) {
        leave(userq);
        close(notifier->eventfd);
        free(notifier);
        return error;
    }
    pthread_detach(thread);
    return 0;
}

/* ---- Life ---- */

static void *map(int fd, uint64_t offset, size_t bytes, int rights)
{
    void *at = mmap(NULL, bytes, rights, MAP_SHARED, fd, (off_t)offset);

    return at == MAP_FAILED ? NULL : at;
}

static void destroy(struct rt_userq *userq)
{
    if (userq->ring)
        munmap(userq->ring, userq->ring_bytes);
    if (userq->fence)
        munmap((void *)userq->fence, PAGE_BYTES);
    if (userq->doorbell)
        munmap((void *)userq->doorbell, PAGE_BYTES);
    pthread_mutex_destroy(&userq->lock);
    pthread_cond_destroy(&userq->left);
    free(userq->ends);
    free(userq);
}

int rt_userq_open(int fd, uint32_t queue, uint64_t base, struct rt_userq **userq)
{
    struct drm_vtpu_queue_map where = { .queue_id = queue };
    struct rt_userq *q;
    int error = call(fd, DRM_IOCTL_VTPU_QUEUE_MAP, &where);

    if (error)
        return error;
    q = calloc(1, sizeof(*q));
    if (!q)
        return ENOMEM;
    q->fd = fd;
    q->queue = queue;
    q->base = q->submitted = base;
    q->ring_bytes = where.ring_bytes;
    q->num_entries = (uint32_t)(where.ring_bytes / sizeof(*q->ring));
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->left, NULL);
    q->num_ends = 2 * q->num_entries;
    q->ends = calloc(q->num_ends, sizeof(*q->ends));
    q->ring = map(fd, where.ring_offset, q->ring_bytes, PROT_READ | PROT_WRITE);
    q->fence = map(fd, where.fence_offset, PAGE_BYTES, PROT_READ);
    q->doorbell = map(fd, where.doorbell_offset, PAGE_BYTES, PROT_READ | PROT_WRITE);
    if (!q->ends || !q->ring || !q->fence || !q->doorbell) {
        destroy(q);
        return ENOMEM;
    }
    *userq = q;
    return 0;
}

void rt_userq_close(struct rt_userq *userq)
{
    atomic_store(&userq->closing, true);
    pthread_mutex_lock(&userq->lock);
    while (userq->notifiers)
        pthread_cond_wait(&userq->left, &userq->lock);
    pthread_mutex_unlock(&userq->lock);
    destroy(userq);
}
