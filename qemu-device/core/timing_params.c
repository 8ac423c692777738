/* SPDX-License-Identifier: MIT */
/*
 * The modelled chip: one of the table's by its name, and a file of lines
 * `parameter = number` that replace some of its values.
 */
#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "machine.h"

typedef struct Field {
    const char *name;
    size_t offset;
    uint32_t least, most;
} Field;

#define FIELD(name, least, most) { #name, offsetof(struct vtpu_timing_params, name), least, most },
static const Field fields[] = { VTPU_TIMING_PARAMS(FIELD) };
#undef FIELD
#define NUM_FIELDS (sizeof(fields) / sizeof(*fields))

typedef struct Set {
    const char *name;
    struct vtpu_timing_params params;
} Set;

#define SET(name, ...) { name, __VA_ARGS__ },
static const Set sets[] = { VTPU_TIMING_SETS(SET) };
#undef SET
#define NUM_SETS (sizeof(sets) / sizeof(*sets))

static _Thread_local char message[320];

__attribute__((format(printf, 1, 2))) static const char *say(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    return message;
}

static const char *no_such_set(const char *name)
{
    char names[128] = "";

    for (size_t i = 0; i < NUM_SETS; i++) {
        strncat(names, i ? ", " : "", sizeof(names) - strlen(names) - 1);
        strncat(names, sets[i].name, sizeof(names) - strlen(names) - 1);
    }
    return say("timing: no chip '%.60s' (there are %s)", name, names);
}

/* Cuts blanks at both ends, in place. */
static char *trim(char *text)
{
    while (isspace((unsigned char)*text)) {
        text++;
    }
    for (char *end = text + strlen(text); end > text && isspace((unsigned char)end[-1]);) {
        *--end = '\0';
    }
    return text;
}

/* NULL, or what is wrong with the line. */
static const char *set_line(char *line, struct vtpu_timing_params *params)
{
    line[strcspn(line, "#\n")] = '\0';
    char *equals = strchr(line, '='), *end;
    if (!equals) {
        return *trim(line) ? say("is no 'parameter = number'") : NULL;
    }
    *equals = '\0';
    char *name = trim(line), *text = trim(equals + 1);
    for (size_t i = 0; i < NUM_FIELDS; i++) {
        if (strcmp(name, fields[i].name)) {
            continue;
        }
        unsigned long long value = strtoull(text, &end, 10);
        if (!isdigit((unsigned char)*text) || *end || value < fields[i].least ||
            value > fields[i].most) {
            return say("%s must be a whole number from %u to %u", name, fields[i].least,
                       fields[i].most);
        }
        uint32_t word = (uint32_t)value;
        memcpy((char *)params + fields[i].offset, &word, sizeof(word));
        return NULL;
    }
    return say("there is no parameter '%.60s'", name);
}

static const char *read_file(const char *file, struct vtpu_timing_params *params)
{
    FILE *stream = fopen(file, "r");
    const char *wrong = NULL;
    char line[256];

    if (!stream) {
        return say("timing-file %.100s: %s", file, strerror(errno));
    }
    for (unsigned number = 1; !wrong && fgets(line, sizeof(line), stream); number++) {
        size_t length = strlen(line);
        bool whole = length && (line[length - 1] == '\n' || feof(stream)); /* no NUL in it */
        if ((wrong = whole ? set_line(line, params)
                           : say("is no text of at most %zu characters", sizeof(line) - 2))) {
            char why[160];
            snprintf(why, sizeof(why), "%s", wrong);
            wrong = say("timing-file %.100s: line %u: %s", file, number, why);
        }
    }
    if (!wrong && ferror(stream)) {
        wrong = say("timing-file %.100s: cannot be read", file);
    }
    fclose(stream);
    return wrong;
}

bool vtpu_timing_params(const char *name, const char *file, struct vtpu_timing_params *params,
                        const char **error)
{
    const Set *set = NULL;

    for (size_t i = 0; i < NUM_SETS; i++) {
        /* A file alone changes the first of the chips. */
        if (name ? !strcmp(name, sets[i].name) : i == 0) {
            set = &sets[i];
        }
    }
    if (!set) {
        *error = no_such_set(name);
        return false;
    }
    *params = set->params;
    *error = file ? read_file(file, params) : NULL;
    return !*error;
}
