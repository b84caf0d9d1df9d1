/* Chat templates: what comes out, which bytes are the user's, limits, files, failures. What equals jinja2 is for tests/chat. */
#include <stdlib.h>
#include <string.h>

#include "chat_template.h"
#include "mem.h"
#include "suite.h"
#include "temp_dir.h"
#include "tokenizer_impl.h"

#define TOKENS "{\"bos_token\":\"<s>\",\"eos_token\":\"</s>\"}"
#define HELLO  "{\"messages\":[{\"role\":\"user\",\"content\":\"Hi <s>\"}],\"add_generation_prompt\":true}"

static const char chatml[] =
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

static enum tl_status run(const char *template, const char *variables, struct tl_chat_text *out, struct tl_error *err)
{
    struct tl_chat_template *t = NULL;
    memset(out, 0, sizeof(*out));
    enum tl_status st = tl_chat_compile(&t, template, strlen(template), TOKENS, err);
    if (st == TL_OK)
        st = tl_chat_render(t, variables, strlen(variables), out, err);
    tl_chat_free(t);
    return st;
}

static void expect(const char *template, const char *variables, const char *text)
{
    struct tl_chat_text out;
    struct tl_error err = {0};
    ck_assert_msg(run(template, variables, &out, &err) == TL_OK, "%s: %s", template, err.msg);
    ck_assert_str_eq(out.text, text);
    ck_assert_uint_eq(out.n_bytes, strlen(text));
    tl_chat_text_clear(&out);
}

static void refuse(const char *template, const char *variables, enum tl_status want, const char *part)
{
    struct tl_chat_text out;
    struct tl_error err = {0};
    enum tl_status st = run(template, variables, &out, &err);
    ck_assert_msg(st == want, "%s: %s, %s", template, tl_status_name(st), err.msg);
    ck_assert_msg(strstr(err.msg, part) != NULL, "'%s' is not in: %s", part, err.msg);
    ck_assert_ptr_null(out.text);
}

START_TEST(a_conversation_becomes_a_prompt)
{
    expect(chatml, HELLO, "<|im_start|>user\nHi <s><|im_end|>\n<|im_start|>assistant\n");
    expect("", HELLO, "");
}
END_TEST

/* The bytes of the answer that are the user's, as text; the others as dots. */
static void expect_plain(const char *template, const char *variables, const char *want)
{
    struct tl_chat_text out;
    struct tl_error err = {0};
    ck_assert_msg(run(template, variables, &out, &err) == TL_OK, "%s", err.msg);
    for (size_t i = 0; i < out.n_bytes; i++)
        if (!out.plain[i])
            out.text[i] = '.';
    ck_assert_str_eq(out.text, want);
    tl_chat_text_clear(&out);
}

START_TEST(user_text_stays_user_text_whatever_is_done_to_it)
{
    static const char v[] = "{\"m\":\" A<s>b \",\"o\":{\"k\":\"<s>\"}}";
    expect_plain("{{ bos_token + m + eos_token }}", v, "... A<s>b ....");
    expect_plain("{{ bos_token ~ m | trim }}", v, "...A<s>b");
    expect_plain("{{ m.split('<')[1] }}|{{ m[1:3] }}", v, "s>b .A<");
    expect_plain("{{ m.replace('A', bos_token) }}", v, " ...<s>b ");
    expect_plain("{{ bos_token.replace('s', m) }}", v, ". A<s>b .");
    expect_plain("{{ m | upper }}{{ m | lower | capitalize }}", v, " A<S>B  a<s>b ");
    expect_plain("{% set x %}{{ m }}:{% endset %}{{ x }}{{ x | length }}", v, " A<s>b ..");
    expect_plain("{{ [bos_token, m] | join('-') }}", v, ".... A<s>b ");
    expect_plain("{% macro f(a, b=m) %}{{ a ~ '-' ~ b }}{% endmacro %}{{ f(bos_token) | upper }}", v, ".... A<S>B ");
    expect_plain("{{ o | tojson }}{{ bos_token }}", v, "{\"k\": \"<s>\"}...");
    expect_plain("{{ o.keys() | join }}{% for c in m %}{{ c }}{% endfor %}", v, "k A<s>b ");
    expect_plain("{{ (m if m else bos_token) ~ (bos_token or m) }}", v, " A<s>b ...");
    expect_plain(
        "{% set ns = namespace(t=m) %}{{ ns.t.strip() }}{{ m | default(bos_token) }}{{ z | default(m) | first }}", v,
        "A<s>b A<s>b  ");
}
END_TEST

START_TEST(special_tokens_of_the_user_are_not_encoded_as_such)
{
    static const char json[] =
        "{\"added_tokens\":[{\"id\":3,\"content\":\"<s>\",\"special\":true,\"normalized\":false}],"
        "\"model\":{\"type\":\"BPE\",\"vocab\":{\"<\":0,\"s\":1,\">\":2},\"merges\":[]}}";
    static const unsigned char plain[] = {0, 0, 0, 1, 1, 1, 0, 0, 1};
    struct tl_tokenizer *tk;
    struct tl_error err = {0};
    int32_t *ids;
    size_t n;
    ck_assert_msg(tl_tokenizer_open_memory(&tk, json, sizeof(json) - 1, true, &err) == TL_OK, "%s", err.msg);
    struct tl_encode_params p = {.text = "<s><s><s>", .text_bytes = 9, .parse_special = true, .plain = plain};
    ck_assert_int_eq(tl_tokenizer_encode(tk, &p, &ids, &n, &err), TL_OK);
    ck_assert_uint_eq(n, 7); /* one token, then three bytes of the user, then three of both */
    ck_assert_int_eq(ids[0], 3);
    for (size_t i = 1; i < n; i++)
        ck_assert_int_eq(ids[i], (int)((i - 1) % 3));
    tl_free(ids);
    p.plain = NULL;
    ck_assert_int_eq(tl_tokenizer_encode(tk, &p, &ids, &n, &err), TL_OK);
    ck_assert_uint_eq(n, 3);
    tl_free(ids);
    tl_tokenizer_free(tk);
}
END_TEST

START_TEST(what_is_outside_the_subset_is_named_with_its_line)
{
    refuse("a\n\n{% include 'x' %}", "{}", TL_ERR_UNSUPPORTED,
           "line 3 of the chat template uses the statement 'include'");
    refuse("{% if 1 %}\n{% macro f() %}{% endmacro %}{% endif %}", "{}", TL_ERR_UNSUPPORTED,
           "line 2 of the chat template uses within a block the statement 'macro'");
    refuse("{% macro f() %}{{ varargs }}{% endmacro %}{{ f(1) }}", "{}", TL_ERR_BAD_PARAM,
           "line 1 of the chat template: the macro f does not take these arguments");
    refuse("{{ x | urlize }}", "{}", TL_ERR_UNSUPPORTED, "line 1 of the chat template uses the filter 'urlize'");
    refuse("\n{{ x is upper }}", "{}", TL_ERR_UNSUPPORTED, "line 2 of the chat template uses the test 'upper'");
    refuse("{{ x.encode() }}", "{}", TL_ERR_UNSUPPORTED, "the method 'encode'");
    refuse("{{ cycler(1) }}", "{}", TL_ERR_UNSUPPORTED, "the function 'cycler'");
    refuse("{{ 1", "{}", TL_ERR_BAD_FILE, "line 1 of the chat template: a tag has no end");
    refuse("{% if 1 %}", "{}", TL_ERR_BAD_FILE, "ends inside a block");
    refuse("\xff", "{}", TL_ERR_BAD_FILE, "UTF-8 at byte 0");
    expect("{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}no day{% endif %}", "{}", "no day");
}
END_TEST

START_TEST(what_does_not_fit_the_values_is_named_with_its_line)
{
    refuse("{{ raise_exception('Not ' + 'so.') }}", "{}", TL_ERR_BAD_PARAM, "refuses this conversation: Not so.");
    refuse("\n{{ 'a' + 1 }}", "{}", TL_ERR_BAD_PARAM,
           "line 2 of the chat template: '+' cannot take a string and a whole number");
    refuse("{{ a.b }}", "{}", TL_ERR_BAD_PARAM, "'b' is asked of an undefined value");
    refuse("{{ [1] }}", "{}", TL_ERR_BAD_PARAM, "a list cannot be written as text");
    refuse("{{ 9223372036854775 * 1000000000000 }}", "{}", TL_ERR_BAD_PARAM, "too large");
    refuse("x", "[]", TL_ERR_BAD_PARAM, "not a JSON object");
    refuse("x", "{", TL_ERR_BAD_PARAM, "not JSON");
}
END_TEST

START_TEST(nothing_runs_away)
{
    char deep[4096] = "{{ ", *big;
    for (int i = 0; i < 1000; i++)
        strcat(deep, "(");
    refuse(deep, "{}", TL_ERR_BAD_FILE, "nested too deep");
    strcpy(deep, "{{ 1");
    for (int i = 0; i < 500; i++)
        strcat(deep, "+1");
    strcat(deep, " }}");
    refuse(deep, "{}", TL_ERR_BAD_FILE, "nested too deep");
    deep[0] = '\0';
    for (int i = 0; i < 300; i++)
        strcat(deep, "{% if 1 %}");
    refuse(deep, "{}", TL_ERR_BAD_FILE, "nested too deep");
    strcpy(deep, "{% macro f() %}{{ f()"); /* as deep as the tree may be, in each of as many calls as there may be */
    for (int i = 0; i < 100; i++)
        strcat(deep, "|string");
    strcat(deep, " }}{% endmacro %}{{ f() }}");
    refuse(deep, "{}", TL_ERR_BAD_PARAM, "macros call each other more than 32 deep");
    refuse("{% macro f() %}{% for i in range(9) %}{{ g() }}{% endfor %}{% endmacro %}{% macro g() %}{% for i in "
           "range(9999) "
           "%}{{ h() }}{% endfor %}{% endmacro %}{% macro h() %}{% for i in range(9999) %}{% endfor %}{% endmacro %}{{ "
           "f() }}",
           "{}", TL_ERR_OUT_OF_RANGE, "");
    refuse("{% set r = range(9999) %}{% for a in r %}{% for b in r %}{% set x = a * b %}{% endfor %}{% endfor %}", "{}",
           TL_ERR_OUT_OF_RANGE, "steps");
    refuse("{% set n = namespace(x='abcdefgh') %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}", "{}",
           TL_ERR_OUT_OF_RANGE, "bytes");
    refuse("{% for a in range(1000000) %}{{ "
           "'abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyz' }}{% endfor %}",
           "{}", TL_ERR_OUT_OF_RANGE, "the chat template");
    big = calloc(1, TL_CHAT_TEMPLATE_BYTES_MAX + 2);
    memset(big, 'x', TL_CHAT_TEMPLATE_BYTES_MAX + 1);
    refuse(big, "{}", TL_ERR_UNSUPPORTED, "at most");
    free(big);
}
END_TEST

static enum tl_status open_with(const char *config, const char *jinja, struct tl_chat_template **t,
                                struct tl_error *err)
{
    char dir[TEMP_PATH];
    temp_dir_make(dir);
    if (config)
        temp_file(dir, "tokenizer_config.json", config, strlen(config));
    if (jinja)
        temp_file(dir, "chat_template.jinja", jinja, strlen(jinja));
    enum tl_status st = tl_chat_open(t, dir, NULL, err);
    temp_dir_remove(dir);
    return st;
}

static void file_gives(const char *config, const char *jinja, const char *text)
{
    struct tl_chat_template *t = NULL;
    struct tl_chat_text out;
    struct tl_error err = {0};
    ck_assert_msg(open_with(config, jinja, &t, &err) == TL_OK, "%s", err.msg);
    if (!text) {
        ck_assert_ptr_null(t);
        return;
    }
    ck_assert_ptr_nonnull(t);
    ck_assert_int_eq(tl_chat_render(t, HELLO, strlen(HELLO), &out, &err), TL_OK);
    ck_assert_str_eq(out.text, text);
    tl_chat_text_clear(&out);
    tl_chat_free(t);
}

static void file_refused(const char *config, const char *jinja, enum tl_status want, const char *part)
{
    struct tl_chat_template *t = NULL;
    struct tl_error err = {0};
    ck_assert_int_eq(open_with(config, jinja, &t, &err), want);
    ck_assert_msg(strstr(err.msg, part) != NULL, "%s", err.msg);
    ck_assert_ptr_null(t);
}

START_TEST(the_template_comes_from_either_file)
{
    file_gives(NULL, NULL, NULL);
    file_gives("{}", NULL, NULL);
    file_gives("{\"chat_template\":null}", NULL, NULL);
    file_gives("{\"chat_template\":\"{{ messages[0].content }}\"}", NULL, "Hi <s>");
    file_gives(
        "{\"chat_template\":[{\"name\":\"rag\",\"template\":\"no\"},{\"name\":\"default\",\"template\":\"yes\"}]}",
        NULL, "yes");
    file_gives("{\"chat_template\":\"config\",\"eos_token\":\"E\",\"bos_token\":{\"content\":\"B\",\"special\":true}}",
               "file {{ bos_token }}{{ eos_token }}\n", "file BE");
}
END_TEST

START_TEST(a_damaged_file_gets_one_sentence)
{
    file_refused("{", NULL, TL_ERR_BAD_FILE, "tokenizer_config.json");
    file_refused("[]", NULL, TL_ERR_BAD_FILE, "not a JSON object");
    file_refused("{\"chat_template\":5}", NULL, TL_ERR_BAD_FILE, "neither a string nor a list");
    file_refused("{\"chat_template\":[]}", NULL, TL_ERR_BAD_FILE, "default");
    file_refused("{\"chat_template\":\"{% block x %}\"}", NULL, TL_ERR_UNSUPPORTED, "'block'");
    file_refused(NULL, "{% block x %}", TL_ERR_UNSUPPORTED, "'block'");
}
END_TEST

START_TEST(a_thinking_model_is_known_by_its_mark)
{
    struct tl_chat_template *t;
    ck_assert_int_eq(tl_chat_compile(&t, "{{ '<think>' }}", 15, NULL, NULL), TL_OK);
    ck_assert(tl_chat_thinks(t));
    tl_chat_free(t);
    ck_assert_int_eq(tl_chat_compile(&t, "x", 1, NULL, NULL), TL_OK);
    ck_assert(!tl_chat_thinks(t));
    tl_chat_free(t);
}
END_TEST

#ifdef TL_TEST_HOOKS
START_TEST(every_failed_allocation_is_survived)
{
    static const char template[] = "{% set ns = namespace(x='') %}{% for m in messages[::-1] if m.role is string %}{% "
                                   "set a %}{{ m.content | upper }}"
                                   "{% endset %}{% set ns.x = ns.x ~ a.split(' ') | join('-') ~ m | tojson %}{% endfor "
                                   "%}{{ ns.x.replace('H', 'JJ') }}";
    int64_t live = tl_mem_live();
    bool done = false;
    for (int n = 1; !done; n++) {
        struct tl_chat_text out;
        struct tl_error err = {0};
        ck_assert_int_lt(n, 1000);
        tl_mem_fail_at(n);
        enum tl_status st = run(template, HELLO, &out, &err);
        done = st == TL_OK && tl_mem_requests() < n;
        ck_assert_msg(st == TL_OK || st == TL_ERR_NO_HOST_MEMORY, "%s", err.msg);
        tl_chat_text_clear(&out);
        tl_mem_fail_at(0);
        ck_assert_int_eq(tl_mem_live(), live);
    }
}
END_TEST
#endif

int main(void)
{
    const TTest *const cases[] = {
        a_conversation_becomes_a_prompt,
        user_text_stays_user_text_whatever_is_done_to_it,
        special_tokens_of_the_user_are_not_encoded_as_such,
        what_is_outside_the_subset_is_named_with_its_line,
        what_does_not_fit_the_values_is_named_with_its_line,
        nothing_runs_away,
        the_template_comes_from_either_file,
        a_damaged_file_gets_one_sentence,
        a_thinking_model_is_known_by_its_mark,
#ifdef TL_TEST_HOOKS
        every_failed_allocation_is_survived,
#endif
    };
    return suite_main("chat_template", cases, sizeof(cases) / sizeof(cases[0]), NULL, NULL, 120);
}
