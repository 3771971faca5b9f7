package command

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// answerLimit is how many bytes one answer of a session may have.
const answerLimit = 64 << 20

// sessionGrace is how long the program may take to end by itself when its session is closed.
const sessionGrace = 3 * time.Second

// Session is a program that reads requests from its standard input, one per line, and writes answers to file descriptor AnswerFD. It is for programs that are
// asked often and start slowly. It takes one request at a time.
//
// When the driver dies, the program gets SIGTERM and the end of its input, and not SIGKILL, so that it can finish what must not be cut short.
type Session struct {
	argv    []string
	cmd     *exec.Cmd
	input   io.WriteCloser
	answers *os.File
	noise   shared
	ended   chan struct{}
}

// AnswerFD is the file descriptor for answers.
const AnswerFD = 3

// Start starts the program of a session. env is added to the environment that Run gives.
func Start(env []string, argv ...string) (*Session, error) {
	s := &Session{argv: argv, ended: make(chan struct{})}
	s.cmd = exec.Command(find(argv[0]), argv[1:]...)
	s.cmd.Env = append([]string{"LC_ALL=C", "PATH=" + searchPath}, env...)
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	s.cmd.Stdout, s.cmd.Stderr = &s.noise, &s.noise
	answers, write, err := os.Pipe()
	if err != nil {
		return nil, s.failed(err)
	}
	defer write.Close()
	s.answers = answers
	s.cmd.ExtraFiles = []*os.File{write}
	if s.input, err = s.cmd.StdinPipe(); err == nil {
		err = s.cmd.Start()
	}
	if err != nil {
		answers.Close()
		return nil, s.failed(err)
	}
	go func() {
		_ = s.cmd.Wait() // nobody needs its status
		close(s.ended)
	}()
	return s, nil
}

func (s *Session) failed(err error) error {
	return &Error{Argv: s.argv, Code: -1, Err: err, Output: s.noise.take()}
}

// Ask sends a request and returns the answer: all bytes up to where complete returns true. Errors are an *Error, which wraps ctx.Err() if ctx has ended; after
// one, the session has to be closed, unless ctx had ended before the request was sent.
func (s *Session) Ask(ctx context.Context, request string, complete func(answer []byte) bool) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, s.failed(err)
	}
	s.noise.take()
	if err := s.answers.SetReadDeadline(time.Time{}); err != nil {
		return nil, s.failed(err)
	}
	cut := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(cut)
		_ = s.answers.SetReadDeadline(time.Unix(1, 0))
	})
	defer func() {
		if !stop() { // the deadline would end the next request
			<-cut
		}
	}()
	if _, err := io.WriteString(s.input, request+"\n"); err != nil {
		return nil, s.failed(err)
	}
	var answer []byte
	chunk := make([]byte, 64<<10)
	for {
		n, err := s.answers.Read(chunk)
		answer = append(answer, chunk[:n]...)
		switch {
		case n > 0 && complete(answer):
			return answer, nil
		case ctx.Err() != nil:
			return nil, s.failed(ctx.Err())
		case errors.Is(err, io.EOF):
			return nil, s.failed(fmt.Errorf("it ended without an answer to %q", request))
		case err != nil:
			return nil, s.failed(err)
		case len(answer) > answerLimit:
			return nil, s.failed(fmt.Errorf("more than %d bytes in answer to %q", answerLimit, request))
		}
	}
}

// Close ends the program by SIGTERM, and after sessionGrace by SIGKILL, and returns when it has ended.
func (s *Session) Close() {
	s.input.Close()
	select {
	case <-s.ended: // another process may have its ID by now
	default:
		_ = syscall.Kill(-s.cmd.Process.Pid, syscall.SIGTERM)
	}
	select {
	case <-s.ended:
	case <-time.After(sessionGrace):
		_ = syscall.Kill(-s.cmd.Process.Pid, syscall.SIGKILL)
		<-s.ended
	}
	s.answers.Close()
}

// Noise returns what the program has printed on its standard output and error since the last request, as one line.
func (s *Session) Noise() string { return s.noise.take() }

// shared is a limited for several goroutines.
type shared struct {
	mu sync.Mutex
	limited
}

func (s *shared) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.limited.Write(p)
}

// take returns what was written, as one line, and forgets it.
func (s *shared) take() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	words := bytes.Fields(s.kept.Bytes())
	s.kept.Reset()
	return string(bytes.Join(words, []byte(" ")))
}
