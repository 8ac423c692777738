// SPDX-License-Identifier: MIT
/*
 * Runs in the guest: three round trips, side by side.
 *
 *   guest_latency NVME [ROUNDS [COUNT]]
 *
 * submit      an empty submission, from the ioctl to the woken waiter
 * user_queue  the same on a user queue: ring entry, doorbell, fence word
 * nvme        a read of 4 KiB from NVME past the page cache
 *
 * A round is COUNT of each, one after another; what is printed, as JSON, are the
 * rounds' medians in microseconds.
 */
#define _GNU_SOURCE
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <drm/vtpu_accel.h>

#define BLOCK		4096
#define NVME_BLOCKS	256
#define SPINS		100000
#define MOST_ROUNDS	100

static int fd, nvme;
static void *block;
static uint32_t queue, syncobj, user_queue;
static struct drm_vtpu_ring_entry *ring;
static volatile uint64_t *fence;
static volatile uint32_t *doorbell;
static uint32_t tail, num_entries;

static int64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static void call(unsigned long code, void *data, const char *name)
{
	if (ioctl(fd, code, data))
		err(1, "%s", name);
}

static void submit(void)
{
	struct drm_vtpu_cmd nop = { .op = DRM_VTPU_OP_NOP };
	struct drm_vtpu_sync sync = { .handle = syncobj, .flags = DRM_VTPU_SYNC_SIGNAL };
	struct drm_vtpu_submit args = {
		.queue_id = queue,
		.cmds = (uintptr_t)&nop,
		.num_cmds = 1,
		.syncs = (uintptr_t)&sync,
		.num_syncs = 1,
	};
	struct drm_syncobj_wait wait = {
		.handles = (uintptr_t)&syncobj,
		.count_handles = 1,
		.timeout_nsec = INT64_MAX,
	};

	call(DRM_IOCTL_VTPU_SUBMIT, &args, "SUBMIT");
	call(DRM_IOCTL_SYNCOBJ_WAIT, &wait, "SYNCOBJ_WAIT");
}

/* Polls for as long as a short command may take, then sleeps. */
static void submit_user(void)
{
	struct drm_vtpu_ring_entry entry = {
		.op = DRM_VTPU_OP_NOP,
		.flags = DRM_VTPU_RING_FENCE | DRM_VTPU_RING_IRQ,
		.fence = tail + 1,
	};
	struct drm_vtpu_queue_wait wait = {
		.queue_id = user_queue,
		.value = tail + 1,
		.timeout_ns = INT64_MAX,
	};

	ring[tail % num_entries] = entry;
	__atomic_thread_fence(__ATOMIC_RELEASE);
	*doorbell = ++tail;
	for (int i = 0; i < SPINS; i++)
		if (*fence >= tail)
			return;
	call(DRM_IOCTL_VTPU_QUEUE_WAIT, &wait, "QUEUE_WAIT");
}

static void read_nvme(void)
{
	static unsigned int n;

	if (pread(nvme, block, BLOCK, (off_t)(n++ % NVME_BLOCKS) * BLOCK) != BLOCK)
		err(1, "read");
}

static void *map(uint64_t offset, size_t bytes, int rights)
{
	void *at = mmap(NULL, bytes, rights, MAP_SHARED, fd, (off_t)offset);

	if (at == MAP_FAILED)
		err(1, "mmap");
	return at;
}

static void setup(void)
{
	struct drm_vtpu_vm_create vm = { 0 };
	struct drm_vtpu_queue_create args = { .priority = DRM_VTPU_PRIORITY_NORMAL };
	struct drm_syncobj_create sync = { 0 };
	struct drm_vtpu_queue_map where = { 0 };

	fd = open("/dev/accel/accel0", O_RDWR);
	if (fd < 0)
		err(1, "open");
	call(DRM_IOCTL_VTPU_VM_CREATE, &vm, "VM_CREATE");
	args.vm_id = vm.vm_id;
	call(DRM_IOCTL_VTPU_QUEUE_CREATE, &args, "QUEUE_CREATE");
	queue = args.queue_id;
	call(DRM_IOCTL_SYNCOBJ_CREATE, &sync, "SYNCOBJ_CREATE");
	syncobj = sync.handle;

	args.flags = DRM_VTPU_QUEUE_USER;
	call(DRM_IOCTL_VTPU_QUEUE_CREATE, &args, "QUEUE_CREATE");
	user_queue = where.queue_id = args.queue_id;
	call(DRM_IOCTL_VTPU_QUEUE_MAP, &where, "QUEUE_MAP");
	ring = map(where.ring_offset, where.ring_bytes, PROT_READ | PROT_WRITE);
	fence = map(where.fence_offset, BLOCK, PROT_READ);
	doorbell = map(where.doorbell_offset, BLOCK, PROT_READ | PROT_WRITE);
	num_entries = where.ring_bytes / sizeof(*ring);
}

static int compare(const void *a, const void *b)
{
	int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

	return (x > y) - (x < y);
}

static double median_us(void (*trip)(void), int64_t *times, int count)
{
	for (int i = -count / 10; i < count; i++) {
		int64_t start = now();

		trip();
		if (i >= 0)
			times[i] = now() - start;
	}
	qsort(times, count, sizeof(*times), compare);
	return times[count / 2] / 1e3;
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*trip)(void);
	} kinds[] = { { "submit", submit }, { "user_queue", submit_user }, { "nvme", read_nvme } };
	static double us[3][MOST_ROUNDS];
	int rounds = argc > 2 ? atoi(argv[2]) : 11, count = argc > 3 ? atoi(argv[3]) : 500;
	int64_t *times = calloc(count, sizeof(*times));

	if (argc < 2 || rounds < 1 || rounds > MOST_ROUNDS || count < 10 || !times)
		errx(2, "usage: guest_latency NVME [ROUNDS [COUNT]]");
	nvme = open(argv[1], O_RDONLY | O_DIRECT);
	if (nvme < 0)
		err(1, "%s", argv[1]);
	if (posix_memalign(&block, BLOCK, BLOCK))
		errx(1, "no memory");
	setup();

	for (int r = 0; r < rounds; r++)
		for (int k = 0; k < 3; k++)
			us[k][r] = median_us(kinds[k].trip, times, count);
	for (int k = 0; k < 3; k++) {
		printf("%s\"%s\": [", k ? ", " : "{", kinds[k].name);
		for (int r = 0; r < rounds; r++)
			printf("%s%.2f", r ? ", " : "", us[k][r]);
		printf("]");
	}
	puts("}");
	return 0;
}
