/* SPDX-License-Identifier: MIT */
#include "elf_image.h"

#include <elf.h>
#include <inttypes.h>
#include <stdbool.h>
#include <string.h>
#include <vtpu_hw.h>

#include "error.h"

#define BAD(elf, format, ...) \
    rt_fail(TPURT_ERROR_BAD_EXECUTABLE, "executable \"%s\": " format, (elf)->name, ##__VA_ARGS__)

/* The image may lie at any address, so its structures are copied out. */
static Elf64_Ehdr header(const struct rt_elf *elf)
{
    Elf64_Ehdr value;

    memcpy(&value, elf->image, sizeof(value));
    return value;
}

static Elf64_Shdr section(const struct rt_elf *elf, uint32_t index)
{
    Elf64_Shdr value;

    memcpy(&value, elf->image + header(elf).e_shoff + (uint64_t)index * sizeof(value),
           sizeof(value));
    return value;
}

static Elf64_Sym symbol(const struct rt_elf *elf, const Elf64_Shdr *table, uint32_t index)
{
    Elf64_Sym value;

    memcpy(&value, elf->image + table->sh_offset + (uint64_t)index * sizeof(value),
           sizeof(value));
    return value;
}

static uint32_t word(const uint8_t *at)
{
    uint32_t value;

    memcpy(&value, at, sizeof(value));
    return value;
}

static bool within(const struct rt_elf *elf, uint64_t offset, uint64_t bytes)
{
    return offset <= elf->bytes && bytes <= elf->bytes - offset;
}

static int check_header(const struct rt_elf *elf)
{
    Elf64_Ehdr h;

    if (elf->bytes < sizeof(h))
        return BAD(elf, "truncated: %" PRIu64 " bytes, an ELF header has %zu", elf->bytes,
                   sizeof(h));
    h = header(elf);
    if (memcmp(h.e_ident, ELFMAG, SELFMAG))
        return BAD(elf, "no ELF file: it begins %02x %02x %02x %02x", h.e_ident[0], h.e_ident[1],
                   h.e_ident[2], h.e_ident[3]);
    if (h.e_ident[EI_CLASS] != ELFCLASS64 || h.e_ident[EI_DATA] != ELFDATA2LSB ||
        h.e_ident[EI_VERSION] != EV_CURRENT || h.e_version != EV_CURRENT)
        return BAD(elf, "not ELF64, little endian, version 1");
    if (h.e_machine != RT_ELF_MACHINE)
        return BAD(elf, "machine 0x%x, this device is 0x%x", h.e_machine, RT_ELF_MACHINE);
    if (h.e_type != ET_DYN)
        return BAD(elf, "ELF type %u, not %u (ET_DYN)", h.e_type, ET_DYN);
    if (h.e_flags && h.e_flags != VTPU_ISA_VERSION) /* 0: the metadata alone states it */
        return BAD(elf, "ISA version %u, this library knows %u", h.e_flags, VTPU_ISA_VERSION);
    if (h.e_shentsize != sizeof(Elf64_Shdr))
        return BAD(elf, "section headers of %u bytes, not %zu", h.e_shentsize,
                   sizeof(Elf64_Shdr));
    if (h.e_shnum == 0 || h.e_shnum > RT_ELF_MAX_SECTIONS)
        return BAD(elf, "%u sections, not 1..%u", h.e_shnum, RT_ELF_MAX_SECTIONS);
    if (!within(elf, h.e_shoff, (uint64_t)h.e_shnum * sizeof(Elf64_Shdr)))
        return BAD(elf, "truncated: section headers at %" PRIu64 " end past its %" PRIu64 " bytes",
                   h.e_shoff, elf->bytes);
    if (h.e_shstrndx >= h.e_shnum)
        return BAD(elf, "section names in section %u of %u", h.e_shstrndx, h.e_shnum);
    return TPURT_OK;
}

/* A string table's every string then ends inside it. */
static int check_strings(const struct rt_elf *elf, uint32_t index)
{
    Elf64_Shdr s = section(elf, index);

    if (s.sh_type != SHT_STRTAB || !s.sh_size || elf->image[s.sh_offset + s.sh_size - 1])
        return BAD(elf, "section %u is no string table", index);
    return TPURT_OK;
}

static int check_sections(const struct rt_elf *elf)
{
    Elf64_Ehdr h = header(elf);
    int status;

    /* Section 0 too: an index that names it is legal in form. */
    for (uint32_t i = 0; i < h.e_shnum; i++) {
        Elf64_Shdr s = section(elf, i);

        if (s.sh_type != SHT_NOBITS && s.sh_type != SHT_NULL &&
            !within(elf, s.sh_offset, s.sh_size))
            return BAD(elf, "truncated: section %u (%" PRIu64 " bytes at %" PRIu64
                       ") ends past its %" PRIu64 " bytes", i, s.sh_size, s.sh_offset, elf->bytes);
    }
    status = check_strings(elf, h.e_shstrndx);
    if (status)
        return status;
    for (uint32_t i = 1; i < h.e_shnum; i++)
        if (section(elf, i).sh_name >= section(elf, h.e_shstrndx).sh_size)
            return BAD(elf, "section %u: its name is outside the string table", i);
    return TPURT_OK;
}

/* Index of the section of that name and type; 0: none. */
static uint32_t find_section(const struct rt_elf *elf, const char *name, uint32_t type)
{
    Elf64_Ehdr h = header(elf);
    const char *names = (const char *)elf->image + section(elf, h.e_shstrndx).sh_offset;

    for (uint32_t i = 1; i < h.e_shnum; i++)
        if (section(elf, i).sh_type == type && !strcmp(names + section(elf, i).sh_name, name))
            return i;
    return 0;
}

struct symbols {
    Elf64_Shdr table;
    const char *names;
    uint64_t names_bytes;
    uint32_t count, text, rodata; /* the sections' indices */
};

static int check_symbols(const struct rt_elf *elf, struct symbols *symbols)
{
    uint32_t index = find_section(elf, ".symtab", SHT_SYMTAB);
    int status;

    symbols->text = find_section(elf, ".text", SHT_PROGBITS);
    symbols->rodata = find_section(elf, ".rodata", SHT_PROGBITS);
    if (!symbols->text || !symbols->rodata || !index)
        return BAD(elf, "no %s section",
                   !symbols->text ? ".text" : !symbols->rodata ? ".rodata" : ".symtab");
    symbols->table = section(elf, index);
    if (symbols->table.sh_entsize != sizeof(Elf64_Sym) ||
        symbols->table.sh_size % sizeof(Elf64_Sym) ||
        symbols->table.sh_size / sizeof(Elf64_Sym) > RT_ELF_MAX_SYMBOLS)
        return BAD(elf, ".symtab is no table of at most %u symbols", RT_ELF_MAX_SYMBOLS);
    symbols->count = (uint32_t)(symbols->table.sh_size / sizeof(Elf64_Sym));
    if (symbols->table.sh_link >= header(elf).e_shnum)
        return BAD(elf, ".symtab: names in section %u of %u", symbols->table.sh_link,
                   header(elf).e_shnum);
    status = check_strings(elf, symbols->table.sh_link);
    if (status)
        return status;
    symbols->names = (const char *)elf->image + section(elf, symbols->table.sh_link).sh_offset;
    symbols->names_bytes = section(elf, symbols->table.sh_link).sh_size;
    for (uint32_t i = 0; i < symbols->count; i++)
        if (symbol(elf, &symbols->table, i).st_name >= symbols->names_bytes)
            return BAD(elf, "symbol %u: its name is outside the string table", i);
    return TPURT_OK;
}

static bool is_descriptor_of(const char *name, const char *kernel)
{
    size_t length = strlen(kernel);

    return !strncmp(name, kernel, length) && !strcmp(name + length, ".kd");
}

static int find_descriptor(const struct rt_elf *elf, const struct symbols *symbols,
                           const char *kernel, const uint8_t **descriptor)
{
    Elf64_Shdr rodata = section(elf, symbols->rodata);

    for (uint32_t i = 0; i < symbols->count; i++) {
        Elf64_Sym s = symbol(elf, &symbols->table, i);
        uint64_t offset = s.st_value - rodata.sh_addr;

        if (s.st_shndx != symbols->rodata || !is_descriptor_of(symbols->names + s.st_name, kernel))
            continue;
        if (offset > rodata.sh_size || rodata.sh_size - offset < RT_ELF_DESCRIPTOR_BYTES)
            return BAD(elf, "kernel \"%s\": its descriptor is outside .rodata", kernel);
        *descriptor = elf->image + rodata.sh_offset + offset;
        return TPURT_OK;
    }
    return BAD(elf, "kernel \"%s\" has no descriptor \"%s.kd\"", kernel, kernel);
}

static int check_kernel(const struct rt_elf *elf, const struct symbols *symbols,
                        const Elf64_Sym *function, struct rt_elf_kernel *kernel)
{
    Elf64_Shdr text = section(elf, symbols->text);
    const uint8_t *d = NULL;
    int status;

    kernel->name = symbols->names + function->st_name;
    status = find_descriptor(elf, symbols, kernel->name, &d);
    if (status)
        return status;
    if (word(d) != RT_ELF_DESCRIPTOR_MAGIC || word(d + 4) != RT_ELF_DESCRIPTOR_VERSION)
        return BAD(elf, "kernel \"%s\": descriptor magic 0x%x version %u, not 0x%x version %u",
                   kernel->name, word(d), word(d + 4), RT_ELF_DESCRIPTOR_MAGIC,
                   RT_ELF_DESCRIPTOR_VERSION);
    kernel->entry = word(d + 8);
    kernel->code_bytes = word(d + 12);
    kernel->num_args = word(d + 16);
    if (word(d + 20) || word(d + 24) || word(d + 28))
        return BAD(elf, "kernel \"%s\": the descriptor's reserved words are not zero",
                   kernel->name);
    if (kernel->entry % VTPU_INSTR_BYTES || kernel->code_bytes % VTPU_INSTR_BYTES ||
        !kernel->code_bytes || kernel->code_bytes > VTPU_MAX_CODE_BYTES)
        return BAD(elf, "kernel \"%s\": %u bytes of code at %u; the limit is %u, in words of %u",
                   kernel->name, kernel->code_bytes, kernel->entry, VTPU_MAX_CODE_BYTES,
                   VTPU_INSTR_BYTES);
    if (kernel->entry > text.sh_size || kernel->code_bytes > text.sh_size - kernel->entry)
        return BAD(elf, "kernel \"%s\": %u bytes of code at %u end past .text's %" PRIu64,
                   kernel->name, kernel->code_bytes, kernel->entry, text.sh_size);
    if (function->st_value - text.sh_addr != kernel->entry ||
        function->st_size != kernel->code_bytes)
        return BAD(elf, "kernel \"%s\": its symbol and its descriptor disagree", kernel->name);
    if (kernel->num_args > VTPU_MAX_ARGS)
        return BAD(elf, "kernel \"%s\": %u arguments, at most %u", kernel->name, kernel->num_args,
                   VTPU_MAX_ARGS);
    return TPURT_OK;
}

static int check_kernels(struct rt_elf *elf)
{
    struct symbols symbols = { 0 };
    Elf64_Shdr text;
    int status = check_symbols(elf, &symbols);

    if (status)
        return status;
    text = section(elf, symbols.text);
    if (!text.sh_size || text.sh_size > RT_ELF_MAX_TEXT || text.sh_size % VTPU_INSTR_BYTES)
        return BAD(elf, ".text has %" PRIu64 " bytes, not 1..%u in words of %u", text.sh_size,
                   RT_ELF_MAX_TEXT, VTPU_INSTR_BYTES);
    elf->text = elf->image + text.sh_offset;
    elf->text_bytes = (uint32_t)text.sh_size;
    for (uint32_t i = 0; i < symbols.count; i++) {
        Elf64_Sym s = symbol(elf, &symbols.table, i);

        if (ELF64_ST_TYPE(s.st_info) != STT_FUNC || s.st_shndx != symbols.text)
            continue;
        if (elf->num_kernels == RT_ELF_MAX_KERNELS)
            return BAD(elf, "more than %u kernels", RT_ELF_MAX_KERNELS);
        status = check_kernel(elf, &symbols, &s, &elf->kernels[elf->num_kernels]);
        if (status)
            return status;
        elf->num_kernels++;
    }
    if (!elf->num_kernels)
        return BAD(elf, "no kernel: .text has no function symbol");
    return TPURT_OK;
}

struct note {
    const uint8_t *owner, *data;
    uint32_t owner_bytes, bytes, type;
};

/* Takes the note at *offset and moves past it; false: it does not fit. */
static bool next_note(const uint8_t *notes, uint64_t total, uint64_t *offset, struct note *note)
{
    uint64_t owner, data, end;

    if (total - *offset < sizeof(Elf64_Nhdr))
        return false;
    note->owner_bytes = word(notes + *offset);
    note->bytes = word(notes + *offset + 4);
    note->type = word(notes + *offset + 8);
    owner = *offset + sizeof(Elf64_Nhdr);
    data = owner + (((uint64_t)note->owner_bytes + 3) & ~3ull);
    end = data + (((uint64_t)note->bytes + 3) & ~3ull);
    if (end > total)
        return false;
    note->owner = notes + owner;
    note->data = notes + data;
    *offset = end;
    return true;
}

static int check_notes(const struct rt_elf *elf)
{
    uint32_t index = find_section(elf, ".note.tpu", SHT_NOTE);
    const void *data;
    uint64_t bytes, offset = 0;
    struct note note;
    Elf64_Shdr s;

    if (!index)
        return BAD(elf, "no .note.tpu section");
    s = section(elf, index);
    while (offset < s.sh_size)
        if (!next_note(elf->image + s.sh_offset, s.sh_size, &offset, &note))
            return BAD(elf, ".note.tpu: the note at %" PRIu64 " ends past the section's %" PRIu64
                       " bytes", offset, s.sh_size);
    if (rt_elf_note(elf, TPURT_NOTE_METADATA, &data, &bytes))
        return BAD(elf, ".note.tpu has no metadata (type 0x%x)", TPURT_NOTE_METADATA);
    if (!rt_elf_note(elf, TPURT_NOTE_CACHE_KEY, &data, &bytes) && bytes != 32)
        return BAD(elf, ".note.tpu: a cache key of %" PRIu64 " bytes, not 32", bytes);
    return TPURT_OK;
}

int rt_elf_parse(const void *image, uint64_t bytes, const char *name, struct rt_elf *elf)
{
    int status;

    memset(elf, 0, sizeof(*elf));
    elf->image = image;
    elf->bytes = bytes;
    elf->name = name && *name ? name : "(unnamed)";
    status = check_header(elf);
    if (!status)
        status = check_sections(elf);
    if (!status)
        status = check_kernels(elf);
    if (!status)
        status = check_notes(elf);
    return status;
}

int rt_elf_section(const struct rt_elf *elf, const char *name, const void **data, uint64_t *bytes)
{
    Elf64_Ehdr h = header(elf);
    const char *names = (const char *)elf->image + section(elf, h.e_shstrndx).sh_offset;

    for (uint32_t i = 1; i < h.e_shnum; i++) {
        Elf64_Shdr s = section(elf, i);

        if (s.sh_type == SHT_NULL || s.sh_type == SHT_NOBITS || strcmp(names + s.sh_name, name))
            continue;
        *data = elf->image + s.sh_offset;
        *bytes = s.sh_size;
        return TPURT_OK;
    }
    return rt_fail(TPURT_ERROR_INVALID, "executable \"%s\": no section \"%s\"", elf->name, name);
}

int rt_elf_note(const struct rt_elf *elf, uint32_t type, const void **data, uint64_t *bytes)
{
    uint32_t index = find_section(elf, ".note.tpu", SHT_NOTE);
    uint64_t offset = 0;
    struct note note;
    Elf64_Shdr s = section(elf, index);

    while (offset < s.sh_size &&
           next_note(elf->image + s.sh_offset, s.sh_size, &offset, &note)) {
        if (note.type != type || note.owner_bytes != 4 || memcmp(note.owner, "TPU", 4))
            continue;
        *data = note.data;
        *bytes = note.bytes;
        return TPURT_OK;
    }
    return rt_fail(TPURT_ERROR_INVALID, "executable \"%s\": no note of type 0x%x", elf->name, type);
}
