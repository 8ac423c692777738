// SPDX-License-Identifier: MIT
/*
 * Looks for calls that break the driver, guided by the code that they reach.
 * Runs in the guest as root.
 *
 *   vtpu-fuzz PORT SECONDS EXECUTIONS SEED FILE...   looks, beginning with the files
 *   vtpu-fuzz PORT replay TIMES FILE...              runs the files again, in order
 *
 * PORT gets records, so that the host knows what ran when the guest dies:
 * a letter, the length (two bytes, little endian), the bytes.
 *   R input that is about to run
 *   N the input that ran last reached something new
 *   S a line about the state of things; the last one ends with "end"
 *   E why it cannot go on
 *
 * Coverage is kcov's (Documentation/dev-tools/kcov.rst): pairs of addresses that
 * follow one another on a thread. On a kernel without it, inputs are random.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "calls.h"

#define KCOV_INIT_TRACE _IOR('c', 1, unsigned long)
#define KCOV_ENABLE _IO('c', 100)
#define KCOV_TRACE_PC 0
#define KCOV_WORDS (256 << 10)
#define MAP_BITS 16
#define CORPUS_MAX 8192

static int port = -1;
static uint64_t random_state;

static void record(char kind, const void *data, size_t size);

static void die(const char *what)
{
	char line[256];
	int size = snprintf(line, sizeof(line), "vtpu-fuzz: %s: %s", what, strerror(errno));

	fprintf(stderr, "%s\n", line);
	if (port >= 0)
		record('E', line, size);
	exit(1);
}

/* xorshift64*: Vigna, 2016. */
static uint64_t chance(uint64_t below)
{
	random_state ^= random_state >> 12;
	random_state ^= random_state << 25;
	random_state ^= random_state >> 27;
	return below ? (random_state * 0x2545f4914f6cdd1dull >> 16) % below : 0;
}

static void record(char kind, const void *data, size_t size)
{
	uint8_t out[3 + PROGRAM_MAX] = { kind, size & 0xff, size >> 8 };
	size_t done = 0;

	memcpy(out + 3, data, size);
	size += 3;
	while (done < size) {
		ssize_t part = write(port, out + done, size - done);

		if (part < 0 && errno != EINTR && errno != EAGAIN) {
			port = -1;
			die("port");
		}
		done += part > 0 ? part : 0;
	}
}

/* ---- Coverage ---- */

static uint8_t seen[1 << MAP_BITS];
static unsigned int seen_count;
static bool have_kcov;

/* Of the calling thread, until it ends; NULL without kcov. */
static unsigned long *kcov_start(void)
{
	int fd = open("/sys/kernel/debug/kcov", O_RDWR | O_CLOEXEC);
	unsigned long *cover;

	if (fd < 0)
		return NULL;
	if (ioctl(fd, KCOV_INIT_TRACE, KCOV_WORDS))
		die("kcov");
	cover = mmap(NULL, KCOV_WORDS * sizeof(*cover), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (cover == MAP_FAILED || ioctl(fd, KCOV_ENABLE, KCOV_TRACE_PC))
		die("kcov");
	return cover;
}

/* Whether the thread reached something new since the last time. */
static bool kcov_take(unsigned long *cover)
{
	unsigned long count, last = 0;
	bool new = false;

	if (!cover)
		return false;
	count = __atomic_load_n(&cover[0], __ATOMIC_RELAXED);
	for (unsigned long i = 1; i <= count && i < KCOV_WORDS; i++) {
		uint64_t pair = (cover[i] ^ last >> 1) * 0x9e3779b97f4a7c15ull;
		uint8_t *at = &seen[pair >> (64 - MAP_BITS)];

		last = cover[i];
		if (!*at) {
			*at = 1;
			seen_count++;
			new = true;
		}
	}
	__atomic_store_n(&cover[0], 0, __ATOMIC_RELAXED);
	return new;
}

/* ---- Execution ---- */

/* The second half of a parallel program runs on these two. */
static struct worker {
	pthread_t thread;
	sem_t start, end;
	const uint8_t *data;
	size_t size;
	unsigned long *cover;
} workers[2];

/*
 * Some calls wait for what never comes; a signal ends them. One that a signal
 * does not end is a finding.
 */
static void interrupted(int number)
{
	(void)number;
}

static void *interrupt_main(void *main_thread)
{
	const struct timespec pause = { .tv_nsec = 20000000 };

	for (;;) {
		nanosleep(&pause, NULL);
		pthread_kill(*(pthread_t *)main_thread, SIGUSR1);
		for (unsigned int i = 0; i < 2; i++)
			pthread_kill(workers[i].thread, SIGUSR1);
	}
	return NULL;
}

static void interrupts_start(void)
{
	const struct sigaction action = { .sa_handler = interrupted };	/* nothing restarts */
	static pthread_t main_thread, thread;

	main_thread = pthread_self();
	sigaction(SIGUSR1, &action, NULL);
	if (pthread_create(&thread, NULL, interrupt_main, &main_thread))
		die("thread");
}

static void wait_for(sem_t *semaphore)
{
	while (sem_wait(semaphore))
		;
}

static void *worker_main(void *argument)
{
	struct worker *worker = argument;

	worker->cover = kcov_start();
	sem_post(&worker->end);
	for (;;) {
		wait_for(&worker->start);
		calls_run(worker->data, worker->size);
		sem_post(&worker->end);
	}
	return NULL;
}

static void workers_start(void)
{
	for (unsigned int i = 0; i < 2; i++) {
		sem_init(&workers[i].start, 0, 0);
		sem_init(&workers[i].end, 0, 0);
		if (pthread_create(&workers[i].thread, NULL, worker_main, &workers[i]))
			die("thread");
		wait_for(&workers[i].end);
	}
}

static void run_killed(const uint8_t *data, size_t size)
{
	const struct timespec some = { .tv_nsec = 200000 + (data[0] >> 2) * 50000 };
	pid_t child = fork();

	if (!child) {
		if (calls_begin())
			calls_run(data + 1, size - 1);
		_exit(0);
	}
	nanosleep(&some, NULL);
	kill(child, SIGKILL);
	while (waitpid(child, NULL, 0) < 0 && errno == EINTR)
		;
}

static void run(const uint8_t *data, size_t size)
{
	if (!size)
		return;
	record('R', data, size);
	if (data[0] & PROGRAM_KILLED) {
		run_killed(data, size);
		return;
	}
	/* Without the device all that follows would fail, and pass. */
	if (!calls_begin())
		die(CALLS_NODE);
	if (data[0] & PROGRAM_PARALLEL && size > 8) {
		size_t half = size / 2, quarter = (size - half) / 2;

		calls_run(data + 1, half - 1);
		workers[0].data = data + half;
		workers[0].size = quarter;
		workers[1].data = data + half + quarter;
		workers[1].size = size - half - quarter;
		for (unsigned int i = 0; i < 2; i++)
			sem_post(&workers[i].start);
		for (unsigned int i = 0; i < 2; i++)
			wait_for(&workers[i].end);
	} else {
		calls_run(data + 1, size - 1);
	}
	calls_end();
}

/* ---- Inputs ---- */

struct program {
	size_t size;
	uint8_t data[];
};

static struct program *corpus[CORPUS_MAX];
static unsigned int corpus_count;

static void corpus_add(const uint8_t *data, size_t size)
{
	struct program *program = malloc(sizeof(*program) + size);

	program->size = size;
	memcpy(program->data, data, size);
	if (corpus_count < CORPUS_MAX)
		corpus[corpus_count++] = program;
	else
		corpus[chance(CORPUS_MAX)] = program;	/* small enough to lose */
}

static size_t load(const char *path, uint8_t *data)
{
	FILE *file = fopen(path, "rb");
	size_t size;

	if (!file)
		die(path);
	size = fread(data, 1, PROGRAM_MAX, file);
	fclose(file);
	return size;
}

/* Calls whose arguments are valid, in any order. */
static size_t generate(uint8_t *data)
{
	size_t size = 1, calls = 4 + chance(24);

	data[0] = chance(8) ? 0 : chance(256);
	for (size_t i = 0; i < calls; i++) {
		data[size++] = chance(calls_count);
		for (uint64_t zeroes = chance(12); zeroes; zeroes--)
			data[size++] = 0;
	}
	return size;
}

static size_t insert(uint8_t *data, size_t size, size_t at, const uint8_t *from, size_t count)
{
	if (size + count > PROGRAM_MAX)
		return size;
	memmove(data + at + count, data + at, size - at);
	memcpy(data + at, from, count);
	return size + count;
}

static size_t mutate_once(uint8_t *data, size_t size)
{
	size_t at = chance(size), count = 1 + chance(16);
	const struct program *other = corpus[chance(corpus_count)];
	uint8_t copy[64];

	if (count > size - at)
		count = size - at;
	switch (chance(8)) {
	case 0:
		data[at] ^= 1 << chance(8);
		return size;
	case 1:
		data[at] = chance(256);
		return size;
	case 2:
		data[at] = chance(2) ? 0 : 160 + chance(96);
		return size;
	case 3:
		memmove(data + at, data + at + count, size - at - count);
		return size - count;
	case 4:
		memcpy(copy, data + at, count);
		return insert(data, size, chance(size), copy, count);
	case 5:
		for (size_t i = 0; i < count; i++)
			copy[i] = i ? 0 : chance(calls_count);
		return insert(data, size, at, copy, count);
	default:	/* a piece of another one */
		if (!other->size)
			return size;
		at = chance(other->size);
		count = 1 + chance(64);
		if (count > other->size - at)
			count = other->size - at;
		return insert(data, size, chance(size), other->data + at, count);
	}
}

static size_t mutate(uint8_t *data)
{
	const struct program *program = corpus[chance(corpus_count)];
	size_t size = program->size;

	memcpy(data, program->data, size);
	for (uint64_t times = 1 + chance(8); times && size; times--)
		size = mutate_once(data, size);
	return size;
}

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

static bool run_and_look(const uint8_t *data, size_t size, unsigned long *cover)
{
	bool new;

	run(data, size);
	new = kcov_take(cover);
	for (unsigned int i = 0; i < 2; i++)
		new |= kcov_take(workers[i].cover);
	return new;
}

/* How many calls have worked; those that have not, by their names. */
static void print_worked(FILE *out)
{
	const char *lead = " (never: ";
	unsigned int count = 0;

	for (unsigned int i = 0; i < calls_count; i++)
		count += calls_worked(i);
	fprintf(out, ", %u of %u calls worked", count, calls_count);
	for (unsigned int i = 0; i < calls_count; i++) {
		if (calls_worked(i))
			continue;
		fprintf(out, "%s%s", lead, calls_name(i));
		lead = " ";
	}
	if (count < calls_count)
		fputc(')', out);
}

static void look(double seconds, unsigned long executions, char **files, int num_files)
{
	unsigned long *cover = kcov_start(), done = 0;
	double start = now(), said = start;
	static uint8_t data[PROGRAM_MAX];
	char line[1024];
	FILE *out;

	have_kcov = cover;
	for (int i = 0; i < num_files; i++) {
		size_t size = load(files[i], data);

		run_and_look(data, size, cover);
		corpus_add(data, size);
		done++;
	}
	while (now() - start < seconds && done < executions) {
		size_t size = corpus_count && chance(8) ? mutate(data) : generate(data);

		if (run_and_look(data, size, cover) || !have_kcov) {
			corpus_add(data, size);
			if (have_kcov)
				record('N', NULL, 0);
		}
		done++;
		if (now() - said > 2) {
			said = now();
			record('S', line, snprintf(line, sizeof(line),
				"%lu executions, %.0f a second, %u pairs, corpus %u", done,
				done / (said - start), seen_count, corpus_count));
		}
	}
	out = fmemopen(line, sizeof(line), "w");
	if (!out)
		die("memory");
	fprintf(out, "%lu executions, %.0f a second, %u pairs, corpus %u", done,
		done / (now() - start), seen_count, corpus_count);
	print_worked(out);
	fprintf(out, "%s, end", have_kcov ? "" : ", no kcov");
	fclose(out);
	record('S', line, strlen(line));
}

int main(int argc, char **argv)
{
	static uint8_t data[PROGRAM_MAX];

	if (argc < 4) {
		fprintf(stderr, "vtpu-fuzz PORT SECONDS EXECUTIONS SEED FILE... | PORT replay TIMES FILE...\n");
		return 2;
	}
	port = open(argv[1], O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
	if (port < 0)
		die(argv[1]);
	if (!calls_begin())
		die(CALLS_NODE);
	calls_end();
	workers_start();
	interrupts_start();
	if (!strcmp(argv[2], "replay")) {
		for (unsigned long times = strtoul(argv[3], NULL, 0); times; times--)
			for (int i = 4; i < argc; i++)
				run(data, load(argv[i], data));
		record('S', "end", 3);
		return 0;
	}
	if (argc < 5)
		return 2;
	random_state = strtoull(argv[4], NULL, 0) * 2 + 1;
	look(strtod(argv[2], NULL), strtoul(argv[3], NULL, 0), argv + 5, argc - 5);
	return 0;
}
