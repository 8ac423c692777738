/* SPDX-License-Identifier: MIT */
/*
 * Writes the HBM of a guest that has prepared page tables and programs: QEMU's generic
 * fuzzer writes registers and answers DMA, but cannot write RAM.
 *
 * The root table is at 0. Virtual addresses below 2 MiB are this HBM, to be read and
 * executed; the 16 MiB above are system memory from bus address 0, to be read and written.
 * Nothing of HBM can be written, so that all inputs find the same.
 */
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "vtpu_hw.h"
#include "vtpu_isa.h"

#define HBM_BYTES (16 << 20)
#define CODE 0x3000
#define SYSTEM_PAGES 8

static uint8_t image[0x4000];

static void put_entry(unsigned table, unsigned index, uint64_t entry)
{
    entry |= VTPU_PTE_VALID;
    memcpy(image + table * VTPU_PAGE_BYTES + index * 8, &entry, sizeof(entry));
}

int main(int argc, char **argv)
{
    /* s8 and s9 are arguments: what is copied, and where to. */
    const struct vtpu_instr code[] = {
        { .opcode = VTPU_OP_DMA_LOAD, .reg = { 0, 8 }, .imm = { 0, 0, 4, 256, 256, 256 } },
        { .opcode = VTPU_OP_SYNC },
        { .opcode = VTPU_OP_DMA_STORE, .reg = { 9, 0 }, .imm = { 0, 0, 4, 256, 256, 256 } },
        { .opcode = VTPU_OP_HALT },
    };

    put_entry(0, 0, 1 * VTPU_PAGE_BYTES);
    put_entry(1, 0, 2 * VTPU_PAGE_BYTES);
    put_entry(2, 0, VTPU_PTE_READ | VTPU_PTE_EXEC | VTPU_PTE_HBM | VTPU_PTE_HUGE);
    for (unsigned i = 0; i < SYSTEM_PAGES; i++) {
        put_entry(2, 1 + i, (uint64_t)i * VTPU_HUGE_PAGE_BYTES | VTPU_PTE_READ | VTPU_PTE_WRITE |
                                VTPU_PTE_HUGE);
    }
    memcpy(image + CODE, code, sizeof(code));

    FILE *file = argc == 2 ? fopen(argv[1], "wb") : NULL;
    if (!file || fwrite(image, sizeof(image), 1, file) != 1 || fflush(file) ||
        ftruncate(fileno(file), HBM_BYTES)) {
        perror("make_hbm");
        return 1;
    }
    return 0;
}
