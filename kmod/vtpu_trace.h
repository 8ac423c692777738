/* SPDX-License-Identifier: GPL-2.0 */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM vtpu

#if !defined(_VTPU_TRACE_H_) || defined(TRACE_HEADER_MULTI_READ)
#define _VTPU_TRACE_H_

#include <linux/tracepoint.h>

/* context and seqno are those of the job's fence, as the scheduler's events have them. */
TRACE_EVENT(vtpu_job_submit,
	TP_PROTO(unsigned int queue, u64 context, u64 seqno, unsigned int cmds, u32 cookie),
	TP_ARGS(queue, context, seqno, cmds, cookie),
	TP_STRUCT__entry(
		__field(unsigned int, queue)
		__field(u64, context)
		__field(u64, seqno)
		__field(unsigned int, cmds)
		__field(u32, cookie)
	),
	TP_fast_assign(
		__entry->queue = queue;
		__entry->context = context;
		__entry->seqno = seqno;
		__entry->cmds = cmds;
		__entry->cookie = cookie;
	),
	TP_printk("queue=%u fence=%llu:%llu cmds=%u cookie=%#x", __entry->queue,
		  __entry->context, __entry->seqno, __entry->cmds, __entry->cookie)
);

/*
 * Here the three countings meet: the fence of before; seq, which the device
 * writes to the queue's fence word; and the ring's entries from first up to
 * tail, as the device counts them and as its own trace events have them.
 */
TRACE_EVENT(vtpu_job_run,
	TP_PROTO(unsigned int queue, u64 context, u64 seqno, u64 seq, u32 first, u32 tail,
		 u32 cookie),
	TP_ARGS(queue, context, seqno, seq, first, tail, cookie),
	TP_STRUCT__entry(
		__field(unsigned int, queue)
		__field(u64, context)
		__field(u64, seqno)
		__field(u64, seq)
		__field(u32, first)
		__field(u32, tail)
		__field(u32, cookie)
	),
	TP_fast_assign(
		__entry->queue = queue;
		__entry->context = context;
		__entry->seqno = seqno;
		__entry->seq = seq;
		__entry->first = first;
		__entry->tail = tail;
		__entry->cookie = cookie;
	),
	TP_printk("queue=%u fence=%llu:%llu seq=%llu first=%u tail=%u cookie=%#x", __entry->queue,
		  __entry->context, __entry->seqno, __entry->seq, __entry->first,
		  __entry->tail, __entry->cookie)
);

TRACE_EVENT(vtpu_job_done,
	TP_PROTO(unsigned int queue, u64 seq, int error),
	TP_ARGS(queue, seq, error),
	TP_STRUCT__entry(
		__field(unsigned int, queue)
		__field(u64, seq)
		__field(int, error)
	),
	TP_fast_assign(
		__entry->queue = queue;
		__entry->seq = seq;
		__entry->error = error;
	),
	TP_printk("queue=%u seq=%llu error=%d", __entry->queue, __entry->seq, __entry->error)
);

/* first counts as above: the entry to blame. */
TRACE_EVENT(vtpu_fault,
	TP_PROTO(unsigned int queue, u32 cause, u32 access, u64 addr, u32 pc, u32 first,
		 u32 cookie),
	TP_ARGS(queue, cause, access, addr, pc, first, cookie),
	TP_STRUCT__entry(
		__field(unsigned int, queue)
		__field(u32, cause)
		__field(u32, access)
		__field(u64, addr)
		__field(u32, pc)
		__field(u32, first)
		__field(u32, cookie)
	),
	TP_fast_assign(
		__entry->queue = queue;
		__entry->cause = cause;
		__entry->access = access;
		__entry->addr = addr;
		__entry->pc = pc;
		__entry->first = first;
		__entry->cookie = cookie;
	),
	TP_printk("queue=%u cause=%u access=%u addr=%#llx pc=%#x first=%u cookie=%#x",
		  __entry->queue, __entry->cause, __entry->access, __entry->addr, __entry->pc,
		  __entry->first, __entry->cookie)
);

TRACE_EVENT(vtpu_irq_masked,
	TP_PROTO(unsigned int vector),
	TP_ARGS(vector),
	TP_STRUCT__entry(
		__field(unsigned int, vector)
	),
	TP_fast_assign(
		__entry->vector = vector;
	),
	TP_printk("vector=%u", __entry->vector)
);

#endif

#undef TRACE_INCLUDE_PATH
#define TRACE_INCLUDE_PATH .
#undef TRACE_INCLUDE_FILE
#define TRACE_INCLUDE_FILE vtpu_trace
#include <trace/define_trace.h>
