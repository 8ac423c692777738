/* SPDX-License-Identifier: MIT */
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "executable.h"

int tpurt_executable_check(const void *image, uint64_t bytes, const char *name)
{
    struct rt_elf elf;

    if (!image && bytes)
        return rt_fail(TPURT_ERROR_INVALID, "image is NULL");
    return rt_elf_parse(image, bytes, name, &elf);
}

static int load_code(tpurt_executable *exe, tpurt_device *device)
{
    char name[48];
    tpurt_buffer_desc desc = {
        .struct_size = sizeof(desc),
        .flags = TPURT_BUFFER_HBM | TPURT_BUFFER_EXECUTABLE,
        .bytes = exe->elf.text_bytes,
        .name = name,
    };
    tpurt_buffer_info info = { .struct_size = sizeof(info) };
    int status;

    if (device->info.isa_version != VTPU_ISA_VERSION)
        return rt_fail(TPURT_ERROR_UNSUPPORTED,
                       "executable \"%s\": ISA version %u, the device's is %u", exe->name,
                       VTPU_ISA_VERSION, device->info.isa_version);
    snprintf(name, sizeof(name), "code of %.36s", exe->name);
    status = tpurt_buffer_create(device, &desc, &exe->code);
    if (status)
        return status;
    status = tpurt_buffer_write(exe->code, 0, exe->elf.text, exe->elf.text_bytes);
    if (!status)
        status = tpurt_buffer_get_info(exe->code, &info);
    exe->text_va = info.va;
    return status;
}

int tpurt_executable_load(tpurt_device *device, const void *image, uint64_t bytes,
                          const char *name, tpurt_executable **executable)
{
    tpurt_executable *exe;
    int status;

    if (!device || !image || !executable)
        return rt_fail(TPURT_ERROR_INVALID, "device, image or executable is NULL");
    exe = calloc(1, sizeof(*exe));
    if (!exe || !(exe->image = malloc(bytes ? bytes : 1))) {
        free(exe);
        return rt_fail(TPURT_ERROR_OUT_OF_MEMORY,
                       "no host memory for an executable of %" PRIu64 " bytes", bytes);
    }
    atomic_init(&exe->refs, 1);
    memcpy(exe->image, image, bytes);
    snprintf(exe->name, sizeof(exe->name), "%s", name ? name : "");
    status = rt_elf_parse(exe->image, bytes, exe->name, &exe->elf);
    if (!status)
        status = load_code(exe, device);
    if (status) {
        tpurt_executable_release(exe);
        return status;
    }
    *executable = exe;
    return TPURT_OK;
}

tpurt_executable *tpurt_executable_retain(tpurt_executable *executable)
{
    return RT_RETAIN(executable);
}

void tpurt_executable_release(tpurt_executable *executable)
{
    if (!RT_DROP(executable))
        return;
    tpurt_buffer_release(executable->code);
    free(executable->image);
    free(executable);
}

uint32_t tpurt_executable_num_kernels(tpurt_executable *executable)
{
    return executable->elf.num_kernels;
}

int tpurt_executable_get_kernel(tpurt_executable *executable, uint32_t index,
                                tpurt_kernel_info *info)
{
    const struct rt_elf_kernel *kernel;
    tpurt_kernel_info ours;

    if (index >= executable->elf.num_kernels)
        return rt_fail(TPURT_ERROR_INVALID, "executable \"%s\": kernel %u of %u", executable->name,
                       index, executable->elf.num_kernels);
    kernel = &executable->elf.kernels[index];
    ours = (tpurt_kernel_info){
        .num_args = kernel->num_args,
        .va = executable->text_va + kernel->entry,
        .text_offset = kernel->entry,
        .code_bytes = kernel->code_bytes,
        .name = kernel->name,
    };
    return rt_struct_out(info, &ours, sizeof(ours), offsetof(tpurt_kernel_info, name),
                         "tpurt_kernel_info");
}

int tpurt_executable_find_kernel(tpurt_executable *executable, const char *name, uint32_t *index)
{
    for (uint32_t i = 0; i < executable->elf.num_kernels; i++)
        if (!strcmp(executable->elf.kernels[i].name, name)) {
            *index = i;
            return TPURT_OK;
        }
    return rt_fail(TPURT_ERROR_INVALID, "executable \"%s\": no kernel \"%s\"", executable->name,
                   name);
}

int tpurt_executable_get_note(tpurt_executable *executable, uint32_t type, const void **data,
                              uint64_t *bytes)
{
    return rt_elf_note(&executable->elf, type, data, bytes);
}

int tpurt_executable_get_section(tpurt_executable *executable, const char *name,
                                 const void **data, uint64_t *bytes)
{
    return rt_elf_section(&executable->elf, name, data, bytes);
}
