package port

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc"
	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/rpc"
)

// tokenTime is the life of the tokens that are requested: the shortest that the API server accepts (TokenRequest).
const tokenTime = 10 * time.Minute

// Callers has connections to the agents of other nodes, and tokens for them. The zero value is not ready: use NewCallers.
type Callers struct {
	api *api

	mu     sync.Mutex
	self   *self            // nil: not asked yet
	agents map[string]agent // by node
}

// agent is the connection to the agent of a node.
type agent struct {
	at         v1alpha1.AgentEndpoint
	connection *grpc.ClientConn
	token      *token
}

// NewCallers returns a Callers that calls with the service account of a configuration. It asks the API server nothing yet.
func NewCallers(config *rest.Config) (*Callers, error) {
	api, err := connect(config)
	return &Callers{api: api, agents: map[string]agent{}}, err
}

// Agent returns a connection to the agent of a node. It connects with its first call, and is returned again for the same endpoint. For another endpoint,
// as of an agent that was restarted, there is a new connection, and calls over the old one fail. ErrUnavailable if the address is none that can be called.
// Errors of calls are those of pkg/errdefs: see rpc.Dial.
func (c *Callers) Agent(node string, at v1alpha1.AgentEndpoint) (grpc.ClientConnInterface, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	have, there := c.agents[node]
	if there && have.at == at {
		return have.connection, nil
	}
	if err := CheckAddress(at.Address); err != nil {
		return nil, fmt.Errorf("%w: the agent of node %s says that it is at %q", errdefs.ErrUnavailable, node, at.Address)
	}
	if have.token == nil {
		have.token = &token{audience: Audience(node), ask: c.newToken}
	}
	if there {
		_ = have.connection.Close() // the agent is not at the old endpoint any more
	}
	var err error
	have.at = at
	if have.connection, err = rpc.Dial(at.Address, only(at.Fingerprint), have.token.get); err != nil {
		delete(c.agents, node)
		return nil, fmt.Errorf("%w: connect to the agent of node %s: %w", errdefs.ErrUnavailable, node, err)
	}
	c.agents[node] = have
	return have.connection, nil
}

// Close ends all connections, and the calls over them. It does nothing if c is nil.
func (c *Callers) Close() error {
	if c == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var failures []error
	for _, agent := range c.agents {
		failures = append(failures, agent.connection.Close())
	}
	c.agents = map[string]agent{}
	return errors.Join(failures...)
}

// newToken requests a token of this pod for an audience, and returns it with its life.
func (c *Callers) newToken(ctx context.Context, audience string) (string, time.Duration, error) {
	me, err := c.whoami(ctx)
	if err != nil {
		return "", 0, err
	}
	seconds := int64(tokenTime / time.Second)
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{Audiences: []string{audience}, ExpirationSeconds: &seconds, BoundObjectRef: me.pod}}
	made, err := c.api.core.ServiceAccounts(me.namespace).CreateToken(ctx, me.account, request, metav1.CreateOptions{})
	if err != nil {
		return "", 0, err
	}
	if given := made.Spec.ExpirationSeconds; given != nil {
		seconds = *given // the API server may choose another life
	}
	return made.Status.Token, time.Duration(seconds) * time.Second, nil
}

func (c *Callers) whoami(ctx context.Context) (self, error) {
	c.mu.Lock()
	have := c.self
	c.mu.Unlock()
	if have != nil {
		return *have, nil
	}
	me, err := c.api.self(ctx)
	if err == nil {
		c.mu.Lock()
		c.self = &me
		c.mu.Unlock()
	}
	return me, err
}

// token is a token for an agent. It is renewed before its life ends, counted by this machine's clock from when it was requested: the clock of the API
// server does not matter.
type token struct {
	audience string
	ask      func(ctx context.Context, audience string) (string, time.Duration, error)

	mu    sync.Mutex
	text  string
	until time.Time // when it is renewed
	asked time.Time // when it was requested
}

// renewPause is the least time between two tokens that the agent refused: it refuses all calls with a token at once, and one new token is enough for them.
const renewPause = time.Second

// askTime is how long an answer of the API server is waited for.
const askTime = 10 * time.Second

// get returns the token, or with renew a new one, unless that was requested within the last renewPause. ErrUnavailable if the API server gives none.
func (t *token) get(ctx context.Context, renew bool) (string, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	if t.text != "" && now.Before(t.until) && (!renew || now.Before(t.asked.Add(renewPause))) {
		return t.text, nil
	}
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	text, life, err := t.ask(ctx, t.audience)
	if err != nil {
		return "", fmt.Errorf("%w: get a token for %s: %w", errdefs.ErrUnavailable, t.audience, err)
	}
	t.text, t.asked, t.until = text, now, now.Add(life*8/10)
	return t.text, nil
}
