// SPDX-License-Identifier: MIT
/*
 * A 32-bit process and the driver: every ioctl once, by the header as it is.
 *
 *   gcc -m32 -O2 -static -nostdlib -ffreestanding -fno-pic -no-pie \
 *       -I../../../kmod/include/uapi -I/usr/include/drm compat.c -o compat
 *
 * Needs no 32-bit C library, for there is none in the guest. Exits with 0, or
 * with the number of the check that failed.
 */
#include <asm/unistd_32.h>
#include <linux/fcntl.h>
#include <linux/mman.h>
#include <linux/types.h>

#include <drm/vtpu_accel.h>

#define PAGE	4096u
#define VA	(1ull << 40)	/* above what 32 bits reach */
#define EFAULT	14
#define EINVAL	22

_Static_assert(sizeof(void *) == 4, "compile with -m32");

long call(long number, long a, long b, long c, long d, long e, long f);
__asm__(".globl call\n"
	"call:\n"
	"push %ebp; push %edi; push %esi; push %ebx\n"
	"mov 20(%esp), %eax; mov 24(%esp), %ebx; mov 28(%esp), %ecx\n"
	"mov 32(%esp), %edx; mov 36(%esp), %esi; mov 40(%esp), %edi; mov 44(%esp), %ebp\n"
	"int $0x80\n"
	"pop %ebx; pop %esi; pop %edi; pop %ebp\n"
	"ret\n");

static long fd;
static volatile __u32 own[2 * PAGE / 4] __attribute__((aligned(4096)));

static void check(int number, int good)
{
	if (!good)
		call(__NR_exit, number, 0, 0, 0, 0, 0);
}

static long control(unsigned long code, void *data)
{
	return call(__NR_ioctl, fd, (long)code, (long)data, 0, 0, 0);
}

static __u64 user(const volatile void *pointer)
{
	return (unsigned long)pointer;
}

static volatile void *place(__u64 offset, unsigned long size, int rights, int number)
{
	unsigned long address = call(__NR_mmap2, 0, size, rights, MAP_SHARED, fd, (long)(offset >> 12));

	check(number, address < -PAGE);
	return (volatile void *)address;
}

static volatile __u32 *map(__u32 handle, int number)
{
	struct drm_vtpu_bo_info info = { .handle = handle };

	check(number, !control(DRM_IOCTL_VTPU_BO_INFO, &info) && info.size == PAGE);
	return place(info.mmap_offset, PAGE, PROT_READ | PROT_WRITE, number);
}

/* Buffers, and what becomes of what a queue does with them. */
static void work(__u32 vm, __u32 queue)
{
	struct drm_vtpu_bo_create host = { .size = 1 }, hbm = { .size = PAGE, .flags = DRM_VTPU_BO_HBM };
	struct drm_vtpu_bo_userptr mine = { .addr = user(own), .size = sizeof(own) };
	struct drm_syncobj_create syncobj = { 0 };
	struct drm_vtpu_vm_bind bind = {
		.vm_id = vm,
		.flags = DRM_VTPU_VM_READ | DRM_VTPU_VM_WRITE,
		.size = PAGE,
	};
	struct drm_vtpu_cmd cmds[] = {
		{ .op = DRM_VTPU_OP_FILL, .payload = { VA, PAGE, 0x11223344 } },
		{ .op = DRM_VTPU_OP_COPY, .payload = { VA + PAGE, VA, PAGE } },
		{ .op = DRM_VTPU_OP_COPY, .payload = { VA + 3 * PAGE, VA + PAGE, 8 } },
	};
	struct drm_vtpu_sync sync = { .flags = DRM_VTPU_SYNC_SIGNAL | DRM_VTPU_SYNC_TIMELINE,
				      .point = 1ull << 40 };
	struct drm_vtpu_submit job = {
		.queue_id = queue,
		.cmds = user(cmds),
		.num_cmds = 3,
		.syncs = user(&sync),
		.num_syncs = 1,
	};
	struct drm_syncobj_timeline_wait wait = { 0 };
	struct drm_vtpu_bo_wait idle = { 0 };
	volatile __u32 *words;
	__u64 point = sync.point;

	check(20, !control(DRM_IOCTL_VTPU_BO_CREATE, &host) && host.size == PAGE);
	check(21, !control(DRM_IOCTL_VTPU_BO_CREATE, &hbm));
	check(22, !control(DRM_IOCTL_VTPU_BO_USERPTR, &mine));
	bind.handle = hbm.handle;
	bind.va = VA;
	check(23, !control(DRM_IOCTL_VTPU_VM_BIND, &bind));
	bind.handle = host.handle;
	bind.va = VA + PAGE;
	check(24, !control(DRM_IOCTL_VTPU_VM_BIND, &bind));
	bind.handle = mine.handle;
	bind.va = VA + 2 * PAGE;
	bind.size = 2 * PAGE;
	check(25, !control(DRM_IOCTL_VTPU_VM_BIND, &bind));

	check(26, !control(DRM_IOCTL_SYNCOBJ_CREATE, &syncobj));
	sync.handle = syncobj.handle;
	/* The upper half of a pointer counts, though a process has none. */
	job.cmds |= 1ull << 40;
	check(27, control(DRM_IOCTL_VTPU_SUBMIT, &job) == -EFAULT);
	job.cmds = user(cmds);
	check(28, !control(DRM_IOCTL_VTPU_SUBMIT, &job));
	wait.handles = user(&syncobj.handle);
	wait.points = user(&point);
	wait.count_handles = 1;
	wait.timeout_nsec = 0x7fffffffffffffff;
	check(29, !control(DRM_IOCTL_SYNCOBJ_TIMELINE_WAIT, &wait));
	idle.handle = host.handle;
	check(30, !control(DRM_IOCTL_VTPU_BO_WAIT, &idle));

	words = map(host.handle, 31);
	check(32, words[0] == 0x11223344 && words[PAGE / 4 - 1] == 0x11223344);
	words = map(hbm.handle, 33);
	check(34, words[5] == 0x11223344);
	check(35, own[PAGE / 4] == 0x11223344 && own[PAGE / 4 + 1] == 0x11223344 &&
		  !own[PAGE / 4 + 2] && !own[0]);

	bind = (struct drm_vtpu_vm_bind){ .vm_id = vm, .op = DRM_VTPU_VM_BIND_UNMAP,
					  .va = VA + 2 * PAGE, .size = 2 * PAGE };
	check(36, !control(DRM_IOCTL_VTPU_VM_BIND, &bind));
}

/* A queue that the process drives itself. */
static void drive(__u32 vm)
{
	struct drm_vtpu_queue_create queue = {
		.vm_id = vm,
		.priority = DRM_VTPU_PRIORITY_NORMAL,
		.flags = DRM_VTPU_QUEUE_USER,
	};
	struct drm_vtpu_queue_map where = { 0 };
	struct drm_vtpu_queue_wait wait = { .value = 1ull << 40, .timeout_ns = 0x7fffffffffffffff };
	struct drm_vtpu_queue_destroy end = { 0 };
	volatile struct drm_vtpu_ring_entry *ring;
	volatile __u32 *doorbell;
	volatile __u64 *fence;

	check(40, !control(DRM_IOCTL_VTPU_QUEUE_CREATE, &queue));
	where.queue_id = wait.queue_id = end.queue_id = queue.queue_id;
	check(41, !control(DRM_IOCTL_VTPU_QUEUE_MAP, &where));
	ring = place(where.ring_offset, where.ring_bytes, PROT_READ | PROT_WRITE, 42);
	fence = place(where.fence_offset, PAGE, PROT_READ, 43);
	doorbell = place(where.doorbell_offset, PAGE, PROT_READ | PROT_WRITE, 44);
	ring->op = DRM_VTPU_OP_NOP;
	ring->flags = DRM_VTPU_RING_FENCE | DRM_VTPU_RING_IRQ;
	ring->fence = wait.value;
	__atomic_store_n(doorbell, 1, __ATOMIC_RELEASE);
	check(45, !control(DRM_IOCTL_VTPU_QUEUE_WAIT, &wait));
	check(46, *fence == wait.value);
	check(47, !control(DRM_IOCTL_VTPU_QUEUE_DESTROY, &end));
}

int main(void)
{
	struct drm_vtpu_info info = { 0 };
	struct drm_vtpu_dev_query query = { .size = sizeof(info), .data = user(&info) };
	struct drm_vtpu_vm_create vm = { 0 };
	struct drm_vtpu_queue_create queue = { .priority = DRM_VTPU_PRIORITY_NORMAL };
	struct drm_vtpu_queue_state state = { 0 };
	struct drm_vtpu_counter counter = { .id = DRM_VTPU_COUNTER_QUEUE_BUSY_NS };
	struct drm_vtpu_perfmon perfmon = { .num_counters = 1, .counters = user(&counter) };
	struct drm_vtpu_queue_destroy end_queue = { 0 };
	struct drm_vtpu_vm_destroy end_vm = { 0 };

	fd = call(__NR_open, (long)"/dev/accel/accel0", O_RDWR, 0, 0, 0, 0);
	check(1, fd >= 0);
	check(2, !control(DRM_IOCTL_VTPU_DEV_QUERY, &query) && query.size >= sizeof(info));
	check(3, info.va_end == 1ull << 48 && info.page_bytes == PAGE && info.hbm_bytes);
	check(4, !control(DRM_IOCTL_VTPU_VM_CREATE, &vm));
	queue.vm_id = vm.vm_id;
	check(5, !control(DRM_IOCTL_VTPU_QUEUE_CREATE, &queue));
	work(vm.vm_id, queue.queue_id);
	drive(vm.vm_id);
	state.queue_id = perfmon.queue_id = queue.queue_id;
	check(6, !control(DRM_IOCTL_VTPU_QUEUE_STATE, &state));
	check(7, state.completed == 1 && state.status == DRM_VTPU_QUEUE_OK &&
		 state.fault_pc == ~0u);
	check(8, !control(DRM_IOCTL_VTPU_PERFMON, &perfmon) && counter.value);
	end_queue.queue_id = queue.queue_id;
	check(9, !control(DRM_IOCTL_VTPU_QUEUE_DESTROY, &end_queue));
	end_vm.pad = 1;
	check(10, control(DRM_IOCTL_VTPU_VM_DESTROY, &end_vm) == -EINVAL);
	end_vm = (struct drm_vtpu_vm_destroy){ .vm_id = vm.vm_id };
	check(11, !control(DRM_IOCTL_VTPU_VM_DESTROY, &end_vm));
	return 0;
}

void _start(void)
{
	call(__NR_exit, main(), 0, 0, 0, 0, 0);
}
