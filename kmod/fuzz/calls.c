// SPDX-License-Identifier: MIT
#define _GNU_SOURCE
#include "calls.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <drm/drm.h>
#include <drm/vtpu_accel.h>

#define PAGE 4096ul
#define HUGE_PAGE (2ul << 20)
#define KEPT 16			/* of each kind of thing */
#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

/* ---- State ---- */

/* The newest few of a kind; an index wraps around. */
struct things {
	uint64_t value[KEPT];
	unsigned int count;
};

static struct {
	int fds[4];
	struct things bos, vms, queues, syncs, dmabufs;
	struct {
		void *address;
		size_t size;
	} maps[KEPT];
	unsigned int num_maps;
	struct user_queue {
		uint32_t id;
		bool claimed;			/* mapped, or about to be */
		volatile uint8_t *ring;		/* NULL: not mapped */
		volatile uint32_t *doorbell;
		size_t ring_bytes;
		uint32_t tail;
	} user_queues[KEPT];
	unsigned int num_user_queues;
	uint8_t *user;		/* memory for USERPTR, and the arrays of SUBMIT */
} state;

#define USER_BYTES (16 * PAGE)

/* Returns the one that had its place, or 0. */
static uint64_t keep(struct things *things, uint64_t value)
{
	unsigned int at = __atomic_fetch_add(&things->count, 1, __ATOMIC_RELAXED);

	return __atomic_exchange_n(&things->value[at % KEPT], value, __ATOMIC_RELAXED);
}

/* ---- Choices ---- */

struct input {
	const uint8_t *data;
	size_t size;
};

static uint64_t take(struct input *in, size_t bytes)
{
	uint64_t value = 0;

	if (bytes > in->size)
		bytes = in->size;
	memcpy(&value, in->data, bytes);
	in->data += bytes;
	in->size -= bytes;
	return value;
}

static const uint64_t odd_values[] = {
	1, 2, 3, 7, 8, PAGE - 1, PAGE, PAGE + 1, HUGE_PAGE - PAGE, HUGE_PAGE, 1ull << 30,
	0x7fffffff, 0x80000000, 0xffffffff, 1ull << 32, 1ull << 47, (1ull << 48) - PAGE,
	1ull << 48, 0x7fffffffffffffff, 1ull << 63, ~0ull - PAGE + 1, ~0ull,
};

/* Mostly what is valid; else something odd, or anything. */
static uint64_t number(struct input *in, uint64_t valid)
{
	uint8_t way = take(in, 1);

	if (way < 160)
		return valid;
	if (way < 224)
		return odd_values[way % ARRAY_SIZE(odd_values)];
	if (way < 240)
		return valid + (int8_t)take(in, 1);
	return take(in, 8);
}

/* One that there is, or was, or never. */
static uint64_t thing(struct input *in, const struct things *things)
{
	uint8_t way = take(in, 1);

	if (way < 224 && things->count) {
		unsigned int have = things->count < KEPT ? things->count : KEPT;

		return things->value[(things->count - 1 - way % have) % KEPT];
	}
	return way < 240 ? way & 1 : take(in, 4);
}

static uint64_t one_of(struct input *in, uint64_t count)
{
	uint8_t way = take(in, 1);

	return way < 240 ? way % count : take(in, 4);
}

/* Mostly the one that has all the handles. */
static int file(struct input *in)
{
	uint8_t way = take(in, 1);

	return state.fds[way < 240 ? 0 : way % ARRAY_SIZE(state.fds)];
}

static uint64_t address(struct input *in)
{
	return number(in, HUGE_PAGE * (1 + take(in, 1) % 8) + PAGE * (take(in, 1) % 4));
}

static uint64_t soon(struct input *in)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return number(in, now.tv_sec * 1000000000ull + now.tv_nsec + (take(in, 1) << 12));
}

/* Ends at the end of a page behind which nothing is, now and then too early. */
static uint64_t user_pointer(struct input *in, size_t bytes)
{
	return number(in, (uintptr_t)state.user + USER_BYTES - bytes + (take(in, 1) == 1));
}

/* ---- Calls: whether they did what they are for ---- */

/* Takes no argument, so that zeroes more than a call takes do not swallow the next one. */
static bool nothing(struct input *in)
{
	(void)in;
	return true;
}

static bool dev_query(struct input *in)
{
	struct drm_vtpu_dev_query args = { .query = one_of(in, 4) };

	args.size = number(in, 64);
	args.data = user_pointer(in, 64);
	return !ioctl(file(in), DRM_IOCTL_VTPU_DEV_QUERY, &args);
}

static bool bo_create(struct input *in)
{
	struct drm_vtpu_bo_create args = { .size = number(in, PAGE << take(in, 1) % 10) };

	args.flags = one_of(in, 2);
	if (ioctl(file(in), DRM_IOCTL_VTPU_BO_CREATE, &args))
		return false;
	keep(&state.bos, args.handle);
	return true;
}

static bool bo_userptr(struct input *in)
{
	struct drm_vtpu_bo_userptr args = { .size = number(in, PAGE << take(in, 1) % 4) };

	args.addr = number(in, (uintptr_t)state.user);
	args.flags = one_of(in, 2);
	if (ioctl(file(in), DRM_IOCTL_VTPU_BO_USERPTR, &args))
		return false;
	keep(&state.bos, args.handle);
	return true;
}

static bool bo_map(struct input *in)
{
	struct drm_vtpu_bo_info args = { .handle = thing(in, &state.bos) };
	unsigned int at;
	int fd = file(in);
	size_t size;
	void *map;

	if (ioctl(fd, DRM_IOCTL_VTPU_BO_INFO, &args))
		return false;
	size = number(in, args.size);
	map = mmap(NULL, size, PROT_READ | PROT_WRITE, take(in, 1) == 1 ? MAP_PRIVATE : MAP_SHARED,
		   fd, number(in, args.mmap_offset));
	if (map == MAP_FAILED)
		return false;
	at = __atomic_fetch_add(&state.num_maps, 1, __ATOMIC_RELAXED);
	if (at >= KEPT) {
		munmap(map, size);
		return true;
	}
	state.maps[at].address = map;
	__atomic_store_n(&state.maps[at].size, size, __ATOMIC_RELEASE);
	return true;
}

/*
 * Into the first page of a mapping, through the kernel so that a mapping that
 * gives SIGBUS is an error code: programs, or anything.
 */
static bool bo_write(struct input *in)
{
	static const uint8_t opcodes[] = { 0x01 /* HALT */, 0x14 /* JUMP to itself */, 0x02 /* TRAP */ };
	unsigned int at = take(in, 1) % KEPT;
	uint8_t words[256] = { 0 };
	uint8_t way = take(in, 1);
	bool written = false;
	int pipe_fds[2];

	if (state.maps[at].size < sizeof(words))
		return false;
	if (way < 200) {
		for (size_t i = 0; i < sizeof(words); i += 64)
			words[i] = opcodes[way % ARRAY_SIZE(opcodes)];
	} else {
		for (size_t i = 0; i < sizeof(words); i += 8) {
			uint64_t word = take(in, 8);

			memcpy(words + i, &word, sizeof(word));
		}
	}
	if (pipe2(pipe_fds, O_NONBLOCK))
		return false;
	if (write(pipe_fds[1], words, sizeof(words)) > 0)
		written = read(pipe_fds[0], state.maps[at].address, sizeof(words)) > 0;
	close(pipe_fds[0]);
	close(pipe_fds[1]);
	return written;
}

static bool bo_unmap(struct input *in)
{
	unsigned int at = take(in, 1) % KEPT;
	size_t size = __atomic_exchange_n(&state.maps[at].size, 0, __ATOMIC_RELAXED);

	return size && !munmap(state.maps[at].address, size);
}

static bool bo_wait(struct input *in)
{
	struct drm_vtpu_bo_wait args = { .handle = thing(in, &state.bos) };

	args.pad = number(in, 0);
	args.timeout_ns = soon(in);
	return !ioctl(file(in), DRM_IOCTL_VTPU_BO_WAIT, &args);
}

static bool bo_close(struct input *in)
{
	struct drm_gem_close args = { .handle = thing(in, &state.bos) };

	return !ioctl(file(in), DRM_IOCTL_GEM_CLOSE, &args);
}

static bool bo_export(struct input *in)
{
	struct drm_prime_handle args = { .handle = thing(in, &state.bos) };
	int old;

	args.flags = number(in, DRM_CLOEXEC | DRM_RDWR);
	if (ioctl(file(in), DRM_IOCTL_PRIME_HANDLE_TO_FD, &args))
		return false;
	old = keep(&state.dmabufs, args.fd);
	if (old)
		close(old);
	return true;
}

static bool bo_import(struct input *in)
{
	struct drm_prime_handle args = { .fd = thing(in, &state.dmabufs) };

	if (ioctl(file(in), DRM_IOCTL_PRIME_FD_TO_HANDLE, &args))
		return false;
	keep(&state.bos, args.handle);
	return true;
}

static bool vm_create(struct input *in)
{
	struct drm_vtpu_vm_create args = { .flags = number(in, 0) };

	if (ioctl(file(in), DRM_IOCTL_VTPU_VM_CREATE, &args))
		return false;
	keep(&state.vms, args.vm_id);
	return true;
}

static bool vm_destroy(struct input *in)
{
	struct drm_vtpu_vm_destroy args = { .vm_id = thing(in, &state.vms) };

	args.pad = number(in, 0);
	return !ioctl(file(in), DRM_IOCTL_VTPU_VM_DESTROY, &args);
}

static bool vm_bind(struct input *in)
{
	struct drm_vtpu_vm_bind args = { .vm_id = thing(in, &state.vms) };

	args.handle = thing(in, &state.bos);
	args.flags = number(in, DRM_VTPU_VM_READ | DRM_VTPU_VM_WRITE | DRM_VTPU_VM_EXEC);
	args.bo_offset = number(in, 0);
	args.va = address(in);
	args.size = number(in, PAGE << take(in, 1) % 10);
	return !ioctl(file(in), DRM_IOCTL_VTPU_VM_BIND, &args);
}

static bool vm_unbind(struct input *in)
{
	struct drm_vtpu_vm_bind args = { .vm_id = thing(in, &state.vms) };

	args.op = DRM_VTPU_VM_BIND_UNMAP + one_of(in, 1);
	args.va = address(in);
	args.size = number(in, PAGE << take(in, 1) % 10);
	args.handle = number(in, 0);
	return !ioctl(file(in), DRM_IOCTL_VTPU_VM_BIND, &args);
}

static bool queue_create(struct input *in)
{
	struct drm_vtpu_queue_create args = { .vm_id = thing(in, &state.vms) };

	args.priority = one_of(in, 3);
	args.flags = number(in, 0);
	/* Short, so that jobs that never end do not hold up the fuzzer. */
	args.timeout_ms = number(in, 20);
	args.stall_ms = number(in, 20);
	if (ioctl(file(in), DRM_IOCTL_VTPU_QUEUE_CREATE, &args))
		return false;
	keep(&state.queues, args.queue_id);
	return true;
}

static bool queue_destroy(struct input *in)
{
	struct drm_vtpu_queue_destroy args = { .queue_id = thing(in, &state.queues) };

	args.pad = number(in, 0);
	return !ioctl(file(in), DRM_IOCTL_VTPU_QUEUE_DESTROY, &args);
}

static bool queue_state(struct input *in)
{
	struct drm_vtpu_queue_state args = { .queue_id = thing(in, &state.queues) };

	return !ioctl(file(in), DRM_IOCTL_VTPU_QUEUE_STATE, &args);
}

static void command(struct input *in, struct drm_vtpu_cmd *cmd)
{
	*cmd = (struct drm_vtpu_cmd){ .op = 1 + one_of(in, 7), .cookie = take(in, 1) };
	switch (cmd->op) {
	case DRM_VTPU_OP_RUN:
		cmd->payload[0] = address(in);
		cmd->payload[1] = number(in, 64ull << take(in, 1) % 3);
		break;
	case DRM_VTPU_OP_COPY:
	case DRM_VTPU_OP_FILL:
		cmd->payload[0] = address(in);
		cmd->payload[1] = cmd->op == DRM_VTPU_OP_COPY ? address(in) : number(in, 64);
		cmd->payload[2] = number(in, 64);
		break;
	case DRM_VTPU_OP_WAIT:
	case DRM_VTPU_OP_SIGNAL:
	case DRM_VTPU_OP_TIMESTAMP:
		cmd->payload[0] = address(in);
		if (cmd->op != DRM_VTPU_OP_TIMESTAMP)
			cmd->payload[1] = number(in, 0);
		break;
	}
	if (take(in, 1) == 1)
		cmd->payload[take(in, 1) % ARRAY_SIZE(cmd->payload)] = take(in, 8);
}

static bool submit(struct input *in)
{
	struct drm_vtpu_submit args = { .queue_id = thing(in, &state.queues) };
	unsigned int num_cmds = 1 + take(in, 1) % 4, num_syncs = take(in, 1) % 4;
	struct drm_vtpu_cmd cmds[4];
	struct drm_vtpu_sync syncs[4];
	uint8_t way = take(in, 1);

	for (unsigned int i = 0; i < num_cmds; i++)
		command(in, &cmds[i]);
	for (unsigned int i = 0; i < num_syncs; i++) {
		syncs[i] = (struct drm_vtpu_sync){ .handle = thing(in, &state.syncs) };
		syncs[i].flags = one_of(in, 4);
		syncs[i].point = number(in, syncs[i].flags & DRM_VTPU_SYNC_TIMELINE ? 1 : 0);
	}
	args.cmds = (uintptr_t)cmds;
	args.syncs = (uintptr_t)syncs;
	args.num_cmds = num_cmds;
	args.num_syncs = num_syncs;
	if (way >= 192) {
		args.flags = number(in, DRM_VTPU_SUBMIT_RESTARTABLE);
		args.cmds = number(in, args.cmds);
		args.num_cmds = number(in, args.num_cmds);
		args.syncs = number(in, args.syncs);
		args.num_syncs = number(in, args.num_syncs);
	}
	return !ioctl(file(in), DRM_IOCTL_VTPU_SUBMIT, &args);
}

/* ---- User queues ---- */

static bool user_queue_create(struct input *in)
{
	struct drm_vtpu_queue_create args = { .vm_id = thing(in, &state.vms) };
	unsigned int at;

	args.priority = one_of(in, 3);
	args.flags = DRM_VTPU_QUEUE_USER;
	args.timeout_ms = number(in, 20);
	if (ioctl(file(in), DRM_IOCTL_VTPU_QUEUE_CREATE, &args))
		return false;
	keep(&state.queues, args.queue_id);
	at = __atomic_fetch_add(&state.num_user_queues, 1, __ATOMIC_RELAXED);
	if (at < KEPT)
		state.user_queues[at].id = args.queue_id;
	return true;
}

static struct user_queue *user_queue(struct input *in)
{
	unsigned int have = state.num_user_queues < KEPT ? state.num_user_queues : KEPT;
	uint8_t way = take(in, 1);

	return have ? &state.user_queues[way % have] : NULL;
}

/* Pieces in other ways than they are meant to be mapped; nobody uses these. */
static void queue_map_oddly(struct input *in, int fd, const struct drm_vtpu_queue_map *map)
{
	const uint64_t offsets[] = { map->ring_offset, map->fence_offset, map->doorbell_offset };
	const uint64_t sizes[] = { map->ring_bytes, PAGE, PAGE };
	unsigned int which = take(in, 1) % ARRAY_SIZE(offsets);
	size_t size = number(in, sizes[which]);
	void *odd = mmap(NULL, size, take(in, 1) % 8, take(in, 1) % 2 ? MAP_PRIVATE : MAP_SHARED,
			 fd, number(in, offsets[which]));

	if (odd != MAP_FAILED)
		munmap(odd, size);
}

static bool queue_map(struct input *in)
{
	struct user_queue *queue = user_queue(in);
	struct drm_vtpu_queue_map args = { .queue_id = queue ? queue->id : 0 };
	const int rights = PROT_READ | PROT_WRITE;
	int fd = file(in);
	void *ring, *doorbell;

	if (take(in, 1) > 224)
		args.queue_id = thing(in, &state.queues);
	args.pad = number(in, 0);
	if (ioctl(fd, DRM_IOCTL_VTPU_QUEUE_MAP, &args))
		return false;
	if (take(in, 1) > 192)
		queue_map_oddly(in, fd, &args);
	if (!queue || args.queue_id != queue->id ||
	    __atomic_exchange_n(&queue->claimed, true, __ATOMIC_RELAXED))
		return false;
	ring = mmap(NULL, args.ring_bytes, rights, MAP_SHARED, fd, args.ring_offset);
	doorbell = mmap(NULL, PAGE, rights, MAP_SHARED, fd, args.doorbell_offset);
	if (ring == MAP_FAILED || doorbell == MAP_FAILED) {
		if (ring != MAP_FAILED)
			munmap(ring, args.ring_bytes);
		if (doorbell != MAP_FAILED)
			munmap(doorbell, PAGE);
		queue->claimed = false;
		return false;
	}
	queue->ring_bytes = args.ring_bytes;
	queue->doorbell = doorbell;
	queue->ring = ring;
	return true;
}

/*
 * An entry and its doorbell, into what may be a queue, or what is left of one:
 * either takes what is written.
 */
static bool ring_write(struct input *in)
{
	struct user_queue *queue = user_queue(in);
	struct drm_vtpu_ring_entry entry = { 0 };
	struct drm_vtpu_cmd cmd;
	uint8_t way;

	if (!queue || !queue->ring)
		return false;
	command(in, &cmd);
	entry.op = cmd.op;
	entry.flags = number(in, DRM_VTPU_RING_FENCE | DRM_VTPU_RING_IRQ);
	entry.cookie = cmd.cookie;
	entry.fence = number(in, queue->tail + 1);
	memcpy(entry.payload, cmd.payload, sizeof(entry.payload));
	way = take(in, 1);
	if (way > 240)
		((uint8_t *)&entry)[way % sizeof(entry)] = take(in, 1);
	memcpy((void *)(queue->ring + queue->tail * sizeof(entry) % queue->ring_bytes), &entry,
	       sizeof(entry));
	queue->tail = number(in, queue->tail + 1);
	__atomic_store_n(queue->doorbell, queue->tail, __ATOMIC_RELEASE);
	return true;
}

/* The same entries again and again, as fast as the doorbell takes them: interrupts. */
static bool ring_flood(struct input *in)
{
	struct user_queue *queue = user_queue(in);
	const struct drm_vtpu_ring_entry nop = {
		.op = DRM_VTPU_OP_NOP, .flags = DRM_VTPU_RING_FENCE | DRM_VTPU_RING_IRQ,
	};
	unsigned int count = 1 + take(in, 1);

	if (!queue || !queue->ring)
		return false;
	for (unsigned int i = 0; i < count; i++) {
		memcpy((void *)(queue->ring + queue->tail * sizeof(nop) % queue->ring_bytes), &nop,
		       sizeof(nop));
		__atomic_store_n(queue->doorbell, ++queue->tail, __ATOMIC_RELEASE);
	}
	return true;
}

static bool queue_wait(struct input *in)
{
	struct user_queue *queue = user_queue(in);
	struct drm_vtpu_queue_wait args = { .queue_id = queue ? queue->id : 0 };

	if (take(in, 1) > 224)
		args.queue_id = thing(in, &state.queues);
	args.pad = number(in, 0);
	args.value = number(in, queue ? queue->tail : 0);
	args.timeout_ns = soon(in);
	return !ioctl(file(in), DRM_IOCTL_VTPU_QUEUE_WAIT, &args);
}

/* ---- The rest ---- */

static bool perfmon(struct input *in)
{
	struct drm_vtpu_counter *counters = (void *)(state.user + USER_BYTES - 4 * sizeof(*counters));
	struct drm_vtpu_perfmon args = { .queue_id = thing(in, &state.queues) };

	args.num_counters = number(in, 1 + take(in, 1) % 4);
	args.counters = user_pointer(in, 4 * sizeof(*counters));
	for (unsigned int i = 0; i < 4; i++) {
		counters[i].id = 1 + one_of(in, 32);
		counters[i].pad = number(in, 0);
	}
	return !ioctl(file(in), DRM_IOCTL_VTPU_PERFMON, &args);
}

static bool sync_create(struct input *in)
{
	struct drm_syncobj_create args = { .flags = one_of(in, 2) };

	if (ioctl(file(in), DRM_IOCTL_SYNCOBJ_CREATE, &args))
		return false;
	keep(&state.syncs, args.handle);
	return true;
}

static bool sync_destroy(struct input *in)
{
	struct drm_syncobj_destroy args = { .handle = thing(in, &state.syncs) };

	return !ioctl(file(in), DRM_IOCTL_SYNCOBJ_DESTROY, &args);
}

static bool sync_wait(struct input *in)
{
	uint32_t handle = thing(in, &state.syncs);
	uint64_t point = take(in, 1) % 4;
	struct drm_syncobj_timeline_wait args = {
		.handles = (uintptr_t)&handle,
		.points = (uintptr_t)&point,
		.timeout_nsec = soon(in),
		.count_handles = 1,
		.flags = one_of(in, 8),
	};

	return !ioctl(file(in), DRM_IOCTL_SYNCOBJ_TIMELINE_WAIT, &args);
}

static bool sync_signal(struct input *in)
{
	uint32_t handle = thing(in, &state.syncs);
	uint64_t point = take(in, 1) % 4;
	struct drm_syncobj_timeline_array args = {
		.handles = (uintptr_t)&handle, .points = (uintptr_t)&point, .count_handles = 1,
	};

	return !ioctl(file(in), DRM_IOCTL_SYNCOBJ_TIMELINE_SIGNAL, &args);
}

static bool file_again(struct input *in)
{
	unsigned int at = 1 + take(in, 1) % (ARRAY_SIZE(state.fds) - 1);
	int new = take(in, 1) % 2 ? dup(state.fds[0]) : open(CALLS_NODE, O_RDWR | O_CLOEXEC);
	int old = __atomic_exchange_n(&state.fds[at], new, __ATOMIC_RELAXED);

	if (old >= 0)
		close(old);
	return new >= 0;
}

static bool file_close(struct input *in)
{
	unsigned int at = take(in, 1) % ARRAY_SIZE(state.fds);
	int old;

	/* The first one goes only now and then: without it little happens. */
	if (!at && take(in, 1) != 1)
		return false;
	old = __atomic_exchange_n(&state.fds[at], -1, __ATOMIC_RELAXED);
	return old >= 0 && !close(old);
}

/* Any number, direction and size, with a page end behind the argument. */
static bool any_ioctl(struct input *in)
{
	unsigned int size = take(in, 1) % 80;
	uint8_t *at = state.user + USER_BYTES - size;
	unsigned long request = (unsigned long)(take(in, 1) % 4) << 30 |
				(unsigned long)number(in, size) % (1 << 14) << 16 | 'd' << 8 |
				(DRM_COMMAND_BASE + take(in, 1) % 20);

	for (unsigned int i = 0; i < size; i++)
		at[i] = take(in, 1);
	return !ioctl(file(in), request, at);
}

static bool pause_a_little(struct input *in)
{
	const struct timespec pause = { .tv_nsec = (take(in, 1) + 1) * 20000 };

	return !nanosleep(&pause, NULL);
}

static const struct {
	const char *name;
	bool (*call)(struct input *in);
} calls[] = {
	{ "nothing", nothing },
	{ "dev_query", dev_query },
	{ "bo_create", bo_create },
	{ "bo_map", bo_map },
	{ "bo_write", bo_write },
	{ "bo_unmap", bo_unmap },
	{ "bo_wait", bo_wait },
	{ "bo_close", bo_close },
	{ "bo_export", bo_export },
	{ "bo_import", bo_import },
	{ "bo_userptr", bo_userptr },
	{ "vm_create", vm_create },
	{ "vm_destroy", vm_destroy },
	{ "vm_bind", vm_bind },
	{ "vm_unbind", vm_unbind },
	{ "queue_create", queue_create },
	{ "queue_destroy", queue_destroy },
	{ "queue_state", queue_state },
	{ "submit", submit },
	{ "perfmon", perfmon },
	{ "sync_create", sync_create },
	{ "sync_destroy", sync_destroy },
	{ "sync_wait", sync_wait },
	{ "sync_signal", sync_signal },
	{ "file_again", file_again },
	{ "file_close", file_close },
	{ "any_ioctl", any_ioctl },
	{ "pause", pause_a_little },
	{ "user_queue_create", user_queue_create },
	{ "queue_map", queue_map },
	{ "ring_write", ring_write },
	{ "ring_flood", ring_flood },
	{ "queue_wait", queue_wait },
};

const unsigned int calls_count = ARRAY_SIZE(calls);

static bool worked[ARRAY_SIZE(calls)];

const char *calls_name(unsigned int number)
{
	return calls[number % ARRAY_SIZE(calls)].name;
}

bool calls_worked(unsigned int number)
{
	return worked[number % ARRAY_SIZE(calls)];
}

bool calls_begin(void)
{
	memset(&state, 0, sizeof(state));
	for (unsigned int i = 1; i < ARRAY_SIZE(state.fds); i++)
		state.fds[i] = -1;
	state.user = mmap(NULL, USER_BYTES + PAGE, PROT_READ | PROT_WRITE,
			  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (state.user == MAP_FAILED || mprotect(state.user + USER_BYTES, PAGE, PROT_NONE))
		return false;
	/* A signal may come in between: fuzz.c. */
	do
		state.fds[0] = open(CALLS_NODE, O_RDWR | O_CLOEXEC);
	while (state.fds[0] < 0 && errno == EINTR);
	return state.fds[0] >= 0;
}

void calls_run(const uint8_t *data, size_t size)
{
	struct input in = { data, size };

	while (in.size) {
		unsigned int number = take(&in, 1) % ARRAY_SIZE(calls);

		if (calls[number].call(&in))
			__atomic_store_n(&worked[number], true, __ATOMIC_RELAXED);
	}
}

void calls_end(void)
{
	for (unsigned int i = 0; i < KEPT; i++)
		if (state.maps[i].size)
			munmap(state.maps[i].address, state.maps[i].size);
	for (unsigned int i = 0; i < KEPT; i++) {
		const struct user_queue *queue = &state.user_queues[i];

		if (queue->ring) {
			munmap((void *)queue->ring, queue->ring_bytes);
			munmap((void *)queue->doorbell, PAGE);
		}
	}
	for (unsigned int i = 0; i < KEPT; i++)
		if (state.dmabufs.value[i])
			close(state.dmabufs.value[i]);
	for (unsigned int i = 0; i < ARRAY_SIZE(state.fds); i++)
		if (state.fds[i] >= 0)
			close(state.fds[i]);
	munmap(state.user, USER_BYTES + PAGE);
}
