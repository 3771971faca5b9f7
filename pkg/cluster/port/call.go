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

// tokenTime is for how long a token is asked for; the API server gives none for less.
const tokenTime = 10 * time.Minute

// Callers calls the agents of other nodes: it has a connection to each, and tokens for them. The zero value is not ready: use NewCallers.
type Callers struct {
	api *api

	mu     sync.Mutex
	self   *self            // nil: not known yet
	agents map[string]agent // by node
}

// agent is what is known of the agent of a node.
type agent struct {
	at         v1alpha1.AgentEndpoint
	connection *grpc.ClientConn
	token      *token
}

// NewCallers returns who calls by the account that a configuration is of. It asks the API server nothing yet.
func NewCallers(config *rest.Config) (*Callers, error) {
	api, err := connect(config)
	return &Callers{api: api, agents: map[string]agent{}}, err
}

// Agent returns a connection to the agent of a node. It connects with the first call, and stays for those that come later; with
// another endpoint, as of an agent that was started again, it is a new one, and calls over the old one fail. Errors of calls are
// those of pkg/errdefs: see rpc.Dial.
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
		_ = have.connection.Close() // nobody is there any more
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

// Close ends all connections, and the calls over them.
func (c *Callers) Close() error {
	if c == nil {
		return nil // there are none
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

// newToken asks for a token of this pod for an audience, and returns it with its life.
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
		seconds = *given // the API server may give it for less
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

// token is one for an agent, which is renewed before it ends: by this machine's clock, from when it was given, so that clocks
// which differ do no harm.
type token struct {
	audience string
	ask      func(ctx context.Context, audience string) (string, time.Duration, error)

	mu    sync.Mutex
	text  string
	until time.Time // it is used
	asked time.Time
}

// renewPause is between two tokens that the agent did not know: it is told so to all of its calls at once.
const renewPause = time.Second

// askTime is how long the API server is waited for.
const askTime = 10 * time.Second

// get returns the token, or with renew another one than that which was there. ErrUnavailable if there is none.
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
