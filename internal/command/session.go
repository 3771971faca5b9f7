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

// answerLimit bounds one answer of a session, in bytes.
const answerLimit = 64 << 20

// sessionGrace is how long a program has to end by itself when its session is over.
const sessionGrace = 3 * time.Second

// Session is a program that reads requests from its standard input, a line each, and
// writes its answers to file descriptor AnswerFD. It is for programs that are asked
// often and take long to start. One request at a time.
//
// The program is told to end (SIGTERM) when the driver dies, and sees the end of its
// input: unlike SIGKILL, that lets it finish what must not be cut short.
type Session struct {
	argv    []string
	cmd     *exec.Cmd
	input   io.WriteCloser
	answers *os.File
	noise   shared
	ended   chan struct{}
}

// AnswerFD is where the program of a Session writes its answers.
const AnswerFD = 3

// Start starts the program of a session; env is added to the environment of Run.
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
		_ = s.cmd.Wait() // how it ended is of no use to anybody
		close(s.ended)
	}()
	return s, nil
}

func (s *Session) failed(err error) error {
	return &Error{Argv: s.argv, Code: -1, Err: err, Output: s.noise.take()}
}

// Ask sends a request and returns the answer: all up to where complete says that it is
// one. An error is an *Error; after it, the session is of no use and must be closed. If
// ctx ended first, it wraps ctx.Err().
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
		if !stop() { // it would cut the next question short
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

// Close ends the program, and returns when it is gone: it may finish what it is at, and
// after a few seconds it is killed.
func (s *Session) Close() {
	s.input.Close()
	select {
	case <-s.ended: // its number may be another's by now
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

// Noise returns what the program has printed since the last request, beside its answer.
func (s *Session) Noise() string { return s.noise.take() }

// shared is a limited for two goroutines.
type shared struct {
	mu sync.Mutex
	limited
}

func (s *shared) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.limited.Write(p)
}

// take returns and forgets what was written, as one line.
func (s *shared) take() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	words := bytes.Fields(s.kept.Bytes())
	s.kept.Reset()
	return string(bytes.Join(words, []byte(" ")))
}
