// SPDX-License-Identifier: MIT
/*
 * The time of an empty submission, from the ioctl to the woken waiter.
 *
 *   cc -O2 -static -I../../../kmod/include/uapi -I/usr/include/drm roundtrip.c -o roundtrip
 *   roundtrip [count]
 *
 * Prints the least, median, 90th percentile and mean, in microseconds, of
 * submitting one NOP and waiting for its syncobj; then the same with two
 * submissions under way at a time.
 */
#include <err.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <time.h>

#include <drm/vtpu_accel.h>

static int fd;
static uint32_t queue;

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

static void submit(uint32_t syncobj)
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

	call(DRM_IOCTL_VTPU_SUBMIT, &args, "submit");
}

static void wait_for(uint32_t syncobj)
{
	struct drm_syncobj_wait args = {
		.handles = (uintptr_t)&syncobj,
		.count_handles = 1,
		.timeout_nsec = now() + 5000000000ll,
	};

	call(DRM_IOCTL_SYNCOBJ_WAIT, &args, "wait");
}

static int compare(const void *a, const void *b)
{
	int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

	return (x > y) - (x < y);
}

static void report(const char *what, int64_t *times, int count)
{
	double sum = 0;

	qsort(times, count, sizeof(*times), compare);
	for (int i = 0; i < count; i++)
		sum += times[i];
	printf("%s: min %.1f median %.1f p90 %.1f mean %.1f us\n", what, times[0] / 1e3,
	       times[count / 2] / 1e3, times[count * 9 / 10] / 1e3, sum / count / 1e3);
}

int main(int argc, char **argv)
{
	int count = argc > 1 ? atoi(argv[1]) : 2000;
	struct drm_vtpu_vm_create vm = { 0 };
	struct drm_vtpu_queue_create args = { .priority = DRM_VTPU_PRIORITY_NORMAL };
	struct drm_syncobj_create sync[2] = { 0 };
	int64_t *times = calloc(count, sizeof(*times));

	fd = open("/dev/accel/accel0", O_RDWR);
	if (fd < 0)
		err(1, "open");
	call(DRM_IOCTL_VTPU_VM_CREATE, &vm, "vm");
	args.vm_id = vm.vm_id;
	call(DRM_IOCTL_VTPU_QUEUE_CREATE, &args, "queue");
	queue = args.queue_id;
	call(DRM_IOCTL_SYNCOBJ_CREATE, &sync[0], "syncobj");
	call(DRM_IOCTL_SYNCOBJ_CREATE, &sync[1], "syncobj");

	for (int i = -100; i < count; i++) {
		int64_t start = now();

		submit(sync[0].handle);
		wait_for(sync[0].handle);
		if (i >= 0)
			times[i] = now() - start;
	}
	report("one at a time", times, count);

	submit(sync[0].handle);
	for (int i = 0; i < count; i++) {
		int64_t start = now();

		submit(sync[(i + 1) % 2].handle);
		wait_for(sync[i % 2].handle);
		times[i] = now() - start;
	}
	wait_for(sync[count % 2].handle);
	report("two at a time", times, count);
	return 0;
}
