/* SPDX-License-Identifier: MIT */
/*
 * elf_mutations FILE ROUNDS: parses damaged copies of an executable, each in a
 * block of exactly its size so that the sanitiser sees every byte too far, and
 * reads all that an accepted one leads to. Prints how many were accepted.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "elf_image.h"
#include "error.h"

static uint64_t seed = 1;

static uint64_t next(uint64_t limit)
{
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return (seed >> 33) % limit;
}

static uint64_t sum(const void *data, uint64_t bytes)
{
    uint64_t total = 0;

    for (uint64_t i = 0; i < bytes; i++)
        total += ((const uint8_t *)data)[i];
    return total;
}

static uint64_t read_all(const struct rt_elf *elf)
{
    static const char *const names[] = { ".text", ".rodata", ".note.tpu", ".tpu.map", ".symtab" };
    uint64_t total = sum(elf->text, elf->text_bytes), bytes;
    const void *data;

    for (uint32_t i = 0; i < elf->num_kernels; i++)
        total += strlen(elf->kernels[i].name) +
                 sum(elf->text + elf->kernels[i].entry, elf->kernels[i].code_bytes);
    for (unsigned i = 0; i < sizeof(names) / sizeof(*names); i++)
        if (!rt_elf_section(elf, names[i], &data, &bytes))
            total += sum(data, bytes);
    for (uint32_t type = 0x21; type <= 0x22; type++)
        if (!rt_elf_note(elf, type, &data, &bytes))
            total += sum(data, bytes);
    return total;
}

static void damage(uint8_t *image, size_t bytes)
{
    static const uint64_t values[] = { 0, 1, 0x7f, 0xff, 0xffff, 0x7fffffff, 0xffffffff,
                                       1ull << 32, 1ull << 63, ~0ull };
    size_t count = 1 + next(4);

    for (size_t i = 0; i < count; i++) {
        uint64_t value = next(3) ? values[next(sizeof(values) / sizeof(*values))] : next(bytes + 64);
        size_t width = (size_t)1 << next(4);
        /* Mostly where the structure is: the headers at either end. */
        size_t at = next(2) ? next(bytes) : next(2) ? next(64) : bytes - 1 - next(bytes / 4);

        if (at + width > bytes)
            at = bytes - width;
        memcpy(image + at, &value, width);
    }
}

int main(int argc, char **argv)
{
    static uint8_t original[1 << 20];
    uint64_t rounds = argc == 3 ? strtoull(argv[2], NULL, 10) : 0, accepted = 0, total = 0;
    FILE *file = argc == 3 ? fopen(argv[1], "rb") : NULL;
    size_t size = file ? fread(original, 1, sizeof(original), file) : 0;

    if (size < 64)
        return 2;
    for (uint64_t i = 0; i < rounds; i++) {
        size_t bytes = next(8) ? size : next(size + 1);
        uint8_t *image = malloc(bytes ? bytes : 1);
        struct rt_elf elf;
        int status;

        memcpy(image, original, bytes);
        if (bytes >= 64 && i)
            damage(image, bytes);
        status = rt_elf_parse(image, bytes, "mutant", &elf);
        if (status == TPURT_OK) {
            accepted++;
            total += read_all(&elf);
        } else if (status != TPURT_ERROR_BAD_EXECUTABLE || !*tpurt_last_error()) {
            return 3;
        }
        free(image);
    }
    fclose(file);
    printf("%" PRIu64 " of %" PRIu64 " accepted, sum %" PRIu64 "\n", accepted, rounds, total);
    return 0;
}
