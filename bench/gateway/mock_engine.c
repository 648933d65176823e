/* A mock inference engine that is never the bottleneck: one thread, epoll, answers put together by memcpy.
 *
 *     mock_engine PORT STREAM_FILE MODEL [RENDERINGS_FILE]
 *
 * It speaks as much of vLLM as a gateway needs: chat completions with prompt_token_ids, token_ids and
 * log-probs, streamed and not; /v1/models, /health, /weight_info; kv_transfer_params.prompt_token_ids.
 *
 * STREAM_FILE is one long text as tokens, a line each: the id, a tab, the text as it stands inside a JSON
 * string, a tab, its bytes as numbers. A request says in its text what it wants: `[[prompt=5000 sampled=200 wait_ms=500 gap_ms=10]]` (the
 * last mark counts) gets tokens 0..5000 as its prompt and 5000..5200 as its answer, so a later request of the
 * same session with a larger prompt extends the earlier one. A request that brings its prompt ids gets those
 * back; log-probs name tokens by their text, or by their id where the request wants that. RENDERINGS_FILE (a line each: words of a request, a tab, ids) gives the prompts of a gateway's probes.
 * The answer begins after wait_ms; a stream then sends one token every gap_ms, or all at once at 0.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MAX_FDS 65536
#define DEFAULT_SAMPLED 200

/* ---- growing buffers ------------------------------------------------------------------------------ */

typedef struct { char *data; size_t size, room; } Buffer;

static void append(Buffer *buffer, const void *data, size_t size) {
    if (buffer->size + size + 1 > buffer->room) {
        buffer->room = (buffer->size + size + 1) * 2;
        buffer->data = realloc(buffer->data, buffer->room);
        if (!buffer->data) exit(3);
    }
    memcpy(buffer->data + buffer->size, data, size);
    buffer->size += size;
    buffer->data[buffer->size] = 0;
}

static void print(Buffer *buffer, const char *format, ...) {
    char text[2048];
    va_list arguments;
    va_start(arguments, format);
    int size = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    append(buffer, text, (size_t)size);
}

/* ---- the token stream ----------------------------------------------------------------------------- */

typedef struct { size_t begin, size; } Span;

static size_t num_tokens;
static Buffer ids, texts, logprobs[2];         /* everything, one after the other; log-probs by text, by id */
static Span *id_of, *text_of, *logprob_of[2];  /* where token i stands in them; ids begin with a comma */

static void load_stream(const char *path) {
    FILE *file = fopen(path, "r");
    if (!file) { perror(path); exit(2); }
    char *line = NULL;
    size_t room = 0, known = 0;
    ssize_t size;
    unsigned state = 12345;
    while ((size = getline(&line, &room, file)) > 0) {
        if (line[size - 1] == '\n') line[--size] = 0;
        char *tab = strchr(line, '\t'), *bytes = tab ? strchr(tab + 1, '\t') : NULL;
        if (!bytes) continue;
        if (num_tokens == known) {
            known = known ? known * 2 : 4096;
            id_of = realloc(id_of, known * sizeof(Span));
            text_of = realloc(text_of, known * sizeof(Span));
            for (int by_id = 0; by_id < 2; by_id++) logprob_of[by_id] = realloc(logprob_of[by_id], known * sizeof(Span));
        }
        *tab = *bytes++ = 0;
        size_t i = num_tokens++;
        id_of[i].begin = ids.size;
        print(&ids, ",%s", line);
        id_of[i].size = ids.size - id_of[i].begin;
        text_of[i] = (Span){texts.size, strlen(tab + 1)};
        append(&texts, tab + 1, text_of[i].size);
        state = state * 1664525u + 1013904223u;
        float value = -(float)(state >> 8) / 16777216.0f * 2.5f;
        for (int by_id = 0; by_id < 2; by_id++) {
            Buffer *out = &logprobs[by_id];
            logprob_of[by_id][i].begin = out->size;
            if (by_id) {
                print(out, ",{\"token\":\"token_id:%s\",\"logprob\":%.17g,\"bytes\":[116,111,107,101,110,95,105,100,58",
                      line, (double)value);
                for (char *digit = line; *digit; digit++) print(out, ",%d", *digit);
            } else {
                print(out, ",{\"token\":\"%s\",\"logprob\":%.17g,\"bytes\":[%s", tab + 1, (double)value, bytes);
            }
            print(out, "],\"top_logprobs\":[]}");
            logprob_of[by_id][i].size = out->size - logprob_of[by_id][i].begin;
        }
    }
    free(line);
    fclose(file);
    if (!num_tokens) { fprintf(stderr, "%s holds no tokens\n", path); exit(2); }
}

/* Tokens [begin, begin+count) of a joined text; the stream repeats behind its end. */
static void append_tokens(Buffer *out, const Buffer *joined, const Span *at, size_t begin, size_t count, int skip) {
    int first = 1;
    while (count) {
        size_t i = begin % num_tokens, run = num_tokens - i < count ? num_tokens - i : count;
        size_t from = at[i].begin, to = at[i + run - 1].begin + at[i + run - 1].size;
        size_t cut = first && skip ? 1 : 0;
        append(out, joined->data + from + cut, to - from - cut);
        begin += run, count -= run, first = 0;
    }
}

/* ---- renderings of probes -------------------------------------------------------------------------- */

typedef struct { char *words, *ids; } Rendering;

static Rendering *renderings;
static size_t num_renderings;

static void load_renderings(const char *path) {
    FILE *file = fopen(path, "r");
    if (!file) { perror(path); exit(2); }
    char *line = NULL;
    size_t room = 0;
    ssize_t size;
    while ((size = getline(&line, &room, file)) > 0) {
        if (line[size - 1] == '\n') line[--size] = 0;
        char *tab = strchr(line, '\t');
        if (!tab) continue;
        *tab = 0;
        renderings = realloc(renderings, (num_renderings + 1) * sizeof(Rendering));
        renderings[num_renderings++] = (Rendering){strdup(line), strdup(tab + 1)};
    }
    free(line);
    fclose(file);
}

/* ---- connections ---------------------------------------------------------------------------------- */

typedef struct {
    int fd, busy, stream;
    Buffer in, out;
    size_t sent, header, whole;
    size_t prompt, sampled, next;   /* of the call under way; `next` is the next token of a stream */
    long wait_ms, gap_ms;
    Buffer given;                   /* prompt ids that the request brought, as text */
    int probe, by_id;
    double temperature;
} Connection;

typedef struct { long when; int fd; unsigned life; } Timer;

static Connection *connections[MAX_FDS];
static unsigned lives[MAX_FDS];
static Timer *heap;
static size_t heap_size, heap_room;
static long num_calls, num_accepted;
static const char *model;
static int poller;

static long now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000L + t.tv_nsec / 1000;
}

static void wake_at(long when, Connection *connection) {
    if (heap_size == heap_room) {
        heap_room = heap_room ? heap_room * 2 : 1024;
        heap = realloc(heap, heap_room * sizeof(Timer));
    }
    size_t i = heap_size++;
    for (; i && heap[(i - 1) / 2].when > when; i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
    heap[i] = (Timer){when, connection->fd, lives[connection->fd]};
}

static Timer pop_timer(void) {
    Timer first = heap[0], last = heap[--heap_size];
    size_t i = 0;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= heap_size) break;
        if (child + 1 < heap_size && heap[child + 1].when < heap[child].when) child++;
        if (heap[child].when >= last.when) break;
        heap[i] = heap[child];
        i = child;
    }
    if (heap_size) heap[i] = last;
    return first;
}

static void drop(Connection *connection) {
    close(connection->fd);
    connections[connection->fd] = NULL;
    lives[connection->fd]++;
    free(connection->in.data);
    free(connection->out.data);
    free(connection->given.data);
    free(connection);
}

/* 1: all sent, 0: the peer reads slowly, -1: the connection is gone. */
static int flush(Connection *connection) {
    Buffer *out = &connection->out;
    while (connection->sent < out->size) {
        ssize_t size = send(connection->fd, out->data + connection->sent, out->size - connection->sent, MSG_NOSIGNAL);
        if (size < 0) {
            if (errno == EAGAIN) {
                struct epoll_event event = {.events = EPOLLIN | EPOLLOUT, .data.fd = connection->fd};
                epoll_ctl(poller, EPOLL_CTL_MOD, connection->fd, &event);
                return 0;
            }
            drop(connection);
            return -1;
        }
        connection->sent += (size_t)size;
    }
    out->size = connection->sent = 0;
    return 1;
}

/* ---- answers -------------------------------------------------------------------------------------- */

static int take_request(Connection *connection);

static void answer_json(Connection *connection, const char *status, const Buffer *body) {
    print(&connection->out, "HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n", status,
          body->size);
    append(&connection->out, body->data, body->size);
}

static void append_prompt(Buffer *out, const Connection *connection) {
    append(out, "[", 1);
    if (connection->given.size) append(out, connection->given.data, connection->given.size);
    else append_tokens(out, &ids, id_of, 0, connection->prompt, 1);
    append(out, "]", 1);
}

/* A gateway's probe: log-probs of the five likeliest tokens, which follow the temperature. */
static void append_probe(Buffer *out, const Connection *connection) {
    for (int i = 0; i < 2; i++) {
        print(out, "%s{\"token\":\"token_id:%d\",\"logprob\":%.6f,\"bytes\":[116],\"top_logprobs\":[", i ? "," : "", 10 + i,
              -1.0 / connection->temperature);
        for (int k = 0; k < 5; k++)
            print(out, "%s{\"token\":\"token_id:%d\",\"logprob\":%.6f,\"bytes\":[116]}", k ? "," : "", 10 + i + k,
                  -(1.0 + k) / connection->temperature);
        print(out, "]}");
    }
}

static void answer_call(Connection *connection) {
    static Buffer body;
    body.size = 0;
    size_t prompt = connection->prompt, sampled = connection->sampled;
    print(&body,
          "{\"id\":\"chatcmpl-%016lx\",\"object\":\"chat.completion\",\"created\":1760000000,\"model\":\"%s\",\"choices\":[{"
          "\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"",
          num_calls, model);
    if (connection->probe) sampled = 2, print(&body, "Blue");
    else append_tokens(&body, &texts, text_of, prompt, sampled, 0);
    print(&body, "\",\"refusal\":null,\"annotations\":null,\"audio\":null,\"function_call\":null,\"tool_calls\":[],"
                 "\"reasoning\":null},\"logprobs\":{\"content\":[");
    if (connection->probe) append_probe(&body, connection);
    else append_tokens(&body, &logprobs[connection->by_id], logprob_of[connection->by_id], prompt, sampled, 1);
    print(&body, "]},\"finish_reason\":\"stop\",\"stop_reason\":null,\"token_ids\":[");
    if (connection->probe) print(&body, "10,11");
    else append_tokens(&body, &ids, id_of, prompt, sampled, 1);
    print(&body,
          "],\"routed_experts\":null}],\"service_tier\":null,\"system_fingerprint\":null,\"usage\":{\"prompt_tokens\":%zu,"
          "\"total_tokens\":%zu,\"completion_tokens\":%zu,\"prompt_tokens_details\":null},\"prompt_logprobs\":null,"
          "\"prompt_token_ids\":",
          prompt, prompt + sampled, sampled);
    append_prompt(&body, connection);
    print(&body, ",\"prompt_text\":null,\"kv_transfer_params\":null}");
    answer_json(connection, "200 OK", &body);
}

static void append_chunk(Connection *connection, const Buffer *event) {
    print(&connection->out, "%zx\r\n", event->size + 8);
    append(&connection->out, "data: ", 6);
    append(&connection->out, event->data, event->size);
    append(&connection->out, "\n\n\r\n", 4);
}

/* One event of a stream: the head with the prompt ids, a token, the usage. Returns whether more follow. */
static int answer_event(Connection *connection) {
    static Buffer event;
    event.size = 0;
    print(&event,
          "{\"id\":\"chatcmpl-%016lx\",\"object\":\"chat.completion.chunk\",\"created\":1760000000,\"model\":\"%s\",\"choices\":",
          num_calls, model);
    size_t step = connection->next++, sampled = connection->sampled, prompt = connection->prompt;
    if (step == 0) {
        print(&connection->out, "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                                "transfer-encoding: chunked\r\n\r\n");
        print(&event, "[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,"
                      "\"finish_reason\":null}],\"prompt_token_ids\":");
        append_prompt(&event, connection);
        print(&event, "}");
    } else if (step <= sampled) {
        size_t at = prompt + step - 1;
        print(&event, "[{\"index\":0,\"delta\":{\"content\":\"");
        append_tokens(&event, &texts, text_of, at, 1, 0);
        print(&event, "\"},\"logprobs\":{\"content\":[");
        append_tokens(&event, &logprobs[connection->by_id], logprob_of[connection->by_id], at, 1, 1);
        print(&event, "]},\"finish_reason\":%s,\"token_ids\":[", step == sampled ? "\"stop\",\"stop_reason\":null" : "null");
        append_tokens(&event, &ids, id_of, at, 1, 1);
        print(&event, "]}]}");
    } else if (step == sampled + 1) {
        print(&event, "[],\"usage\":{\"prompt_tokens\":%zu,\"total_tokens\":%zu,\"completion_tokens\":%zu}}", prompt,
              prompt + sampled, sampled);
    } else {
        print(&connection->out, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
        return 0;
    }
    append_chunk(connection, &event);
    return 1;
}

static void respond(Connection *connection) {
    if (!connection->stream) {
        answer_call(connection);
    } else {
        while (answer_event(connection)) {
            if (connection->gap_ms && connection->next <= connection->sampled + 1) {
                wake_at(now_us() + connection->gap_ms * 1000, connection);
                flush(connection);
                return;
            }
        }
    }
    connection->busy = 0;
    if (flush(connection) >= 0) take_request(connection);
}

/* ---- requests ------------------------------------------------------------------------------------- */

static const char *last_of(const char *text, size_t size, const char *mark) {
    const char *found = NULL, *at = text;
    size_t mark_size = strlen(mark);
    while ((at = memmem(at, size - (size_t)(at - text), mark, mark_size))) found = at, at += mark_size;
    return found;
}

static const char *value_of(const char *body, size_t size, const char *field) {
    const char *at = memmem(body, size, field, strlen(field));
    if (!at) return NULL;
    for (at += strlen(field); *at == ':' || *at == ' ';) at++;
    return at;
}

static void take_ids(Connection *connection, const char *text, size_t size) {
    append(&connection->given, text, size);
    connection->prompt = 1;
    for (size_t i = 0; i < size; i++) connection->prompt += text[i] == ',';
}

static void read_call(Connection *connection, const char *body, size_t size) {
    const char *at;
    connection->next = 0;
    connection->given.size = 0;
    connection->prompt = 16;
    connection->sampled = DEFAULT_SAMPLED;
    connection->wait_ms = connection->gap_ms = 0;
    at = value_of(body, size, "\"stream\"");
    connection->stream = at && *at == 't';
    at = value_of(body, size, "\"top_logprobs\"");
    connection->probe = at && *at == '5';
    at = value_of(body, size, "\"return_tokens_as_token_ids\"");
    connection->by_id = at && *at == 't';
    if (connection->probe) {
        at = value_of(body, size, "\"temperature\"");
        connection->temperature = at ? atof(at) : 1.0;
    }
    if ((at = last_of(body, size, "[[prompt=")))
        sscanf(at, "[[prompt=%zu sampled=%zu wait_ms=%ld gap_ms=%ld]]", &connection->prompt, &connection->sampled,
               &connection->wait_ms, &connection->gap_ms);
    if ((at = value_of(body, size, "\"prompt_token_ids\"")) && *at == '[') {
        const char *end = memchr(at, ']', size - (size_t)(at - body));
        if (end && end > at + 1) take_ids(connection, at + 1, (size_t)(end - at - 1));
        return;
    }
    for (size_t i = 0; size < 4096 && i < num_renderings && !connection->given.size; i++)
        if (memmem(body, size, renderings[i].words, strlen(renderings[i].words)))
            take_ids(connection, renderings[i].ids, strlen(renderings[i].ids));
}

/* Serve what has come completely; the request under way comes first. */
static int take_request(Connection *connection) {
    Buffer *in = &connection->in;
    if (connection->busy || !in->size) return 0;
    if (!connection->whole) {
        char *end = memmem(in->data, in->size, "\r\n\r\n", 4);
        if (!end) return 0;
        connection->header = (size_t)(end - in->data) + 4;
        size_t length = 0;
        for (char *line = in->data; line < end; line = memchr(line, '\n', (size_t)(end - line) + 2) + 1)
            if (!strncasecmp(line, "content-length:", 15)) length = strtoul(line + 15, NULL, 10);
        connection->whole = connection->header + length;
    }
    if (in->size < connection->whole) return 0;
    static Buffer body;
    body.size = 0;
    int is_call = in->data[0] == 'P';
    if (is_call) {
        num_calls++;
        connection->busy = 1;
        read_call(connection, in->data + connection->header, connection->whole - connection->header);
    } else if (!strncmp(in->data, "GET /v1/models", 14)) {
        print(&body, "{\"object\":\"list\",\"data\":[{\"id\":\"%s\",\"object\":\"model\",\"root\":\"%s\",\"max_model_len\":131072}]}",
              model, model);
    } else if (!strncmp(in->data, "GET /weight_info", 16)) {
        print(&body, "{\"weight_version\":\"default\"}");
    } else if (!strncmp(in->data, "GET /stats", 10)) {
        print(&body, "{\"calls\":%ld,\"accepted\":%ld}", num_calls, num_accepted);
    } else {
        print(&body, "{}");
    }
    in->size -= connection->whole;
    memmove(in->data, in->data + connection->whole, in->size);
    connection->whole = 0;
    if (is_call) {
        if (connection->wait_ms) wake_at(now_us() + connection->wait_ms * 1000, connection);
        else respond(connection);
        return 0;
    }
    answer_json(connection, "200 OK", &body);
    return flush(connection) < 0 ? -1 : take_request(connection);
}

static void receive(Connection *connection) {
    static char data[1 << 18];
    for (;;) {
        ssize_t size = recv(connection->fd, data, sizeof data, 0);
        if (size > 0) append(&connection->in, data, (size_t)size);
        if (size == (ssize_t)sizeof data) continue;
        if (size == 0 || (size < 0 && errno != EAGAIN)) { drop(connection); return; }
        break;
    }
    take_request(connection);
}

static void accept_all(int listener) {
    int fd, on = 1;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        if (fd >= MAX_FDS) { close(fd); continue; }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        connections[fd] = calloc(1, sizeof(Connection));
        connections[fd]->fd = fd;
        num_accepted++;
        struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
    }
}

int main(int count, char **arguments) {
    if (count < 4) { fprintf(stderr, "usage: mock_engine PORT STREAM_FILE MODEL [RENDERINGS_FILE]\n"); return 2; }
    signal(SIGPIPE, SIG_IGN);
    load_stream(arguments[2]);
    model = arguments[3];
    if (count > 4) load_renderings(arguments[4]);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), on = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((unsigned short)atoi(arguments[1])),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (bind(listener, (void *)&address, sizeof address) || listen(listener, 4096)) { perror("listen"); return 1; }
    poller = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener}, events[256];
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &event);
    for (;;) {
        int wait_ms = -1;
        if (heap_size) {
            long left = heap[0].when - now_us();
            wait_ms = left <= 0 ? 0 : (int)((left + 999) / 1000);
        }
        int ready = epoll_wait(poller, events, 256, wait_ms);
        for (int i = 0; i < ready; i++) {
            int fd = events[i].data.fd;
            if (fd == listener) { accept_all(listener); continue; }
            Connection *connection = connections[fd];
            if (!connection) continue;
            if (events[i].events & EPOLLOUT) {
                int done = flush(connection);
                if (done < 0) continue;
                if (done) {
                    struct epoll_event only_in = {.events = EPOLLIN, .data.fd = fd};
                    epoll_ctl(poller, EPOLL_CTL_MOD, fd, &only_in);
                }
            }
            if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) receive(connection);
        }
        for (long t = now_us(); heap_size && heap[0].when <= t;) {
            Timer timer = pop_timer();
            Connection *connection = connections[timer.fd];
            if (connection && lives[timer.fd] == timer.life) respond(connection);
        }
    }
}
